"""Pictures and masks: pixels and files. Imports no torch."""

"""Pixels and files. Imports no torch."""

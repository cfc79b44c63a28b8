"""From a name or a folder to a model on a device."""

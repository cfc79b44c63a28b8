"""Loading: from a name, a folder or a hub id to a model on a device."""

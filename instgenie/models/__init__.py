"""Models: the interface that the engine calls, one folder per family, the registry of families, and loading."""

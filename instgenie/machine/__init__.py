"""The machine at hand: its devices, their memory, its files."""

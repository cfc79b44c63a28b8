"""The machine at hand: its devices and their memory."""

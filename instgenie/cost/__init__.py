"""FLOPs, bytes, seconds, plans and prices as plain numbers. Imports no torch."""

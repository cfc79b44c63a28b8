"""Runs the real clients that people use against a server. See `__main__.py`."""

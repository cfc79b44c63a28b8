"""Logs and traces."""

"""Measurements: how good the pictures are and how fast they come."""

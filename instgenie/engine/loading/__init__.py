"""Brings the rows of activations that a step reads."""

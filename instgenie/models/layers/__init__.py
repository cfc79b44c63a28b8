"""Layers that several families have, over packed rows."""

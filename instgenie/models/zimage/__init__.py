"""The Z-Image family."""

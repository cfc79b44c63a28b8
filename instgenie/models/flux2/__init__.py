"""FLUX.2 klein: a family."""

"""Qwen-Image: a family."""

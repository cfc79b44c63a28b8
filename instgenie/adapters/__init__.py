"""Adapters: LoRA files, the layers they patch and their products. Knows layers by name; knows no job and no family."""

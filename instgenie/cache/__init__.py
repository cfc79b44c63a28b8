"""The cache of activations: tiers of memory and files, and the store over them. Knows keys and bytes, no model."""

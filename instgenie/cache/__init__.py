"""Tiers: where activations outlive the process that computed them. Knows keys and bytes; knows no model."""

"""Brings rows of activations to the device that reads them."""

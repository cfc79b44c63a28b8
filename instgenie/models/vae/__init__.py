"""Autoencoders: pictures to latents and back."""

"""The Stable Diffusion family: 1.5, 2.1 and XL."""

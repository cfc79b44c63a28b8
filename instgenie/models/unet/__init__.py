"""The UNet family: Stable Diffusion 1.5, 2.1 and XL."""

"""The families that tests are repeated for, as names: collecting tests imports no torch."""

FLUX_FAMILIES = ("blend", "blend_guided", "fill")
UNET_FAMILIES = ("sd", "sdxl", "sd_fill")
FAMILIES = (*FLUX_FAMILIES, *UNET_FAMILIES)

"""The tiny pipelines that tests are repeated for, by name: collecting tests imports no torch.

`helpers.families` has a function of the same name that makes the pipeline. A new one is an entry here and a function
there.
"""

TINY = {  # and the family of each; its place seeds its weights
    "blend": "flux",
    "blend_guided": "flux",
    "fill": "flux",
    "sd": "unet",
    "sdxl": "unet",
    "sd_fill": "unet",
    "sd3": "sd3",
    "kontext": "flux",
}
FAMILIES = tuple(TINY)
FLUX_FAMILIES = tuple(name for name, family in TINY.items() if family == "flux")
SD3_FAMILIES = tuple(name for name, family in TINY.items() if family == "sd3")
JOINT_FAMILIES = FLUX_FAMILIES + SD3_FAMILIES  # whose text flows beside the image
UNET_FAMILIES = tuple(name for name, family in TINY.items() if family == "unet")
SHORT = "short_builtin"  # the built-in model with four blocks of nine, for the laws

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
    "klein": "flux2",
    "zimage": "zimage",
    "qwen": "qwen",
    "qwen_edit": "qwen",
}
FAMILIES = tuple(TINY)
FLUX_FAMILIES = tuple(name for name, family in TINY.items() if family == "flux")
SD3_FAMILIES = tuple(name for name, family in TINY.items() if family == "sd3")
FLUX2_FAMILIES = tuple(name for name, family in TINY.items() if family == "flux2")
PADDED_FAMILIES = FLUX_FAMILIES + SD3_FAMILIES + FLUX2_FAMILIES  # whose texts have one length and flow beside the image
ZIMAGE_FAMILIES = tuple(name for name, family in TINY.items() if family == "zimage")
JOINT_FAMILIES = PADDED_FAMILIES + ZIMAGE_FAMILIES  # whose text flows beside the image
UNET_FAMILIES = tuple(name for name, family in TINY.items() if family == "unet")
SHORT = "short_builtin"  # the built-in model with four blocks of nine, for the laws

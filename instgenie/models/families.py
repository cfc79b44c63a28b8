"""The registry of families. A family is a folder of this package; it enters by one line of `FAMILIES`."""

from instgenie.models.family import Family
from instgenie.models.flux.family import FLUX
from instgenie.models.flux2.family import FLUX2
from instgenie.models.qwen.family import QWEN
from instgenie.models.sd3.family import SD3
from instgenie.models.unet.family import UNET
from instgenie.models.zimage.family import ZIMAGE

FAMILIES: dict[str, Family] = {
    "flux": FLUX,
    "flux2": FLUX2,
    "qwen": QWEN,
    "sd3": SD3,
    "unet": UNET,
    "zimage": ZIMAGE,
}

PIPELINES = {pipeline: family for family in FAMILIES.values() for pipeline in family.pipelines}
DUMMIES = {dummy: family for family in FAMILIES.values() for dummy in family.dummies}
CONTROLNETS = {kind: load for family in FAMILIES.values() for kind, load in family.controlnets.items()}

"""The server's option for guidance in parallel: devices in pairs, one worker and its companion each."""

from collections.abc import Mapping
from typing import Any

from instgenie.errors import ConfigError
from instgenie.server.options import Option, flag

GUIDANCE_OPTIONS = (
    Option("guidance-parallel", flag, False,
           "compute the two branches of an edit with classifier-free guidance on two devices, for the lowest latency: "
           "workers form pairs, and the second of each pair computes the second branch of the first one's edits"),
)  # fmt: skip


def pair_devices(values: Mapping[str, Any], devices: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The devices of the workers, and those of their companions; none if there are none."""
    if not values["guidance_parallel"]:
        return devices, ()
    if values["cluster"]:
        raise ConfigError("the option guidance-parallel is on: with --cluster, each worker has one device")
    if len(devices) % 2:
        raise ConfigError(
            f"the option guidance-parallel is on: an even number of workers is expected, not {len(devices)}"
        )
    pairs = list(zip(devices[::2], devices[1::2], strict=True))
    for one, other in pairs:
        if one == other and one.startswith("cuda"):
            raise ConfigError(
                f"the option guidance-parallel is on: two devices are expected for each pair of workers, not {one} "
                "twice, which runs one after the other"
            )
    return tuple(one for one, _ in pairs), tuple(other for _, other in pairs)

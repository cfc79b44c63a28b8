"""The time at which a device has finished its work."""

import time

import torch


def now(device: torch.device) -> float:
    """Wait for the device, then read the clock, in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()

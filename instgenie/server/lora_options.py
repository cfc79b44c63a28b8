"""The server's options for LoRAs."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from instgenie.adapters.registry import LoraRegistry
from instgenie.adapters.shipped import shipped_loras
from instgenie.cluster.config import LoraConfig
from instgenie.errors import ConfigError, LoraError
from instgenie.server.options import Option, flag, number, text

GIB = 2**30


def lora_module(given: str) -> tuple[str, str]:
    name, _, path = given.partition("=")
    if not name or not path:
        raise ValueError("NAME=PATH is expected")
    return name, path


def lora_wait(given: str) -> tuple[float, int | None]:
    """A share of the steps, or a number of them."""
    try:
        if given.endswith("%"):
            share = float(given[:-1]) / 100
            if 0 <= share <= 1:
                return share, None
        elif int(given) >= 0:
            return 0.0, int(given)
    except ValueError:
        pass
    raise ValueError("a number of steps, or a share from 0% to 100%, is expected")


LORA_OPTIONS = (
    Option("lora-modules", lora_module, (), "name of a LoRA and its file or folder, for all clients; repeatable",
           "NAME=PATH", default_text="none", repeatable=True),
    Option("lora-dir", text, None, "folder of LoRAs: clients name its files, and give them names with POST /v1/loras",
           "FOLDER", default_text="none"),
    Option("lora-remote", text, None, "any fsspec URL of LoRAs, such as s3://bucket/loras: clients name its files",
           "URL", default_text="none"),
    Option("lora-disk-dir", text, None, "folder for copies of remote LoRAs, on every machine", "FOLDER",
           default_text="instgenie/loras in the user's cache folder"),
    Option("lora-disk-gib", number(0, 65536), 20.0, "disk for copies of remote LoRAs, per machine", "GIB"),
    Option("lora-wait-steps", lora_wait, (0.3, None),
           "steps, or a share of them such as 30%, that an edit takes without its LoRAs while they load; then it waits",
           "STEPS", default_text="30%"),
    Option("lora-merge", flag, True,
           "merge LoRAs into the weights while all edits of a batch have the same ones; no: always add their products"),
    Option("lora-weights-gib", number(0, 65536), 0.0,
           "memory for copies of the weights with LoRAs merged into them, per worker: edits of a batch that have "
           "different LoRAs then multiply by weights of their own; 0: none", "GIB"),
    Option("lora-gpu-gib", number(0, 65536), 2.0, "GPU memory for LoRAs, per worker", "GIB"),
    Option("lora-host-gib", number(0, 65536), 4.0, "main memory for LoRAs, per worker", "GIB"),
)  # fmt: skip


def usual_disk_folder() -> Path:
    """For copies of remote LoRAs, as other programs keep what they can fetch again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "instgenie" / "loras"


def make_loras(values: Mapping[str, Any]) -> LoraConfig:
    """Check the files of the named LoRAs, and of those in the model's folder, before any process starts."""
    share, steps = values["lora_wait_steps"]
    given = {name: str(Path(path).resolve()) for name, path in values["lora_modules"]}
    config = LoraConfig(
        modules=tuple((shipped_loras(values["model"]) | given).items()),
        folder=values["lora_dir"] and str(Path(values["lora_dir"]).resolve()),
        remote=values["lora_remote"],
        disk_folder=str(Path(values["lora_disk_dir"] or usual_disk_folder()).resolve()),
        disk_bytes=round(values["lora_disk_gib"] * GIB),
        gpu_bytes=round(values["lora_gpu_gib"] * GIB),
        host_bytes=round(values["lora_host_gib"] * GIB),
        wait_share=share,
        merges=values["lora_merge"],
        weights_bytes=round(values["lora_weights_gib"] * GIB),
        wait_steps=steps,
    )
    try:
        LoraRegistry(dict(config.modules), config.folder, config.remote, config.disk_folder)
    except LoraError as error:
        raise ConfigError(str(error)) from None
    return config

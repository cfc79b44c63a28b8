"""Fits a LoRA file to a pipeline: which tensors patch which layers. Everything is checked by the file's header alone,
so a file that does not fit is refused before a byte of its weights is read. Needs no torch."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from instgenie.adapters.header import WeightsHeader
from instgenie.adapters.keys import NETWORK, T5, parse_key, underscored
from instgenie.adapters.layers import Alias, LayerShape, LayerTable
from instgenie.errors import LoraError

METADATA = "lora_adapter_metadata"  # of files that diffusers saves: the settings of PEFT as JSON
OLDER = {  # how names of layers end, and how they did
    ".to_out.0": ".to_out",
    ".self_attn.q_proj": ".self_attn.to_q",
    ".self_attn.k_proj": ".self_attn.to_k",
    ".self_attn.v_proj": ".self_attn.to_v",
    ".self_attn.out_proj": ".self_attn.to_out",
}


@dataclass(frozen=True)
class Fitted:
    """A pair of tensors and the layers they patch."""

    part: str
    layers: tuple[str, ...]
    num_outputs: tuple[int, ...]  # per layer
    down: str  # keys of the file
    up: str
    alpha: str | None
    rank: int
    settings_scale: float | None  # alpha / rank as the settings of the file say; None: they do not
    swaps_halves: bool


def fit(header: WeightsHeader, table: LayerTable, settings: Mapping[str, Any] | None = None) -> list[Fitted]:
    """Fit every key of a file, or raise a LoraError that names the first that does not. Settings are those of PEFT,
    where they lie beside the file."""
    pairs: dict[tuple[str, str], dict[str, str]] = {}
    last = max((part for part in table.shapes if part != NETWORK), default=T5)  # of the text encoders
    for key in header.tensors:
        part, layer, tensor = parse_key(key)
        pairs.setdefault((last if part == T5 else part, layer), {})[tensor] = key
    inside = settings or read_settings(header.metadata)
    if inside.get("use_dora") or any(key.endswith(".use_dora") and value for key, value in inside.items()):
        raise LoraError("the settings of the file say use_dora: DoRA is not supported")
    return [fit_pair(header, table, part, layer, keys, inside) for (part, layer), keys in pairs.items()]


def fit_pair(
    header: WeightsHeader,
    table: LayerTable,
    part: str,
    layer: str,
    keys: Mapping[str, str],
    settings: Mapping[str, Any],
) -> Fitted:
    key = next(iter(keys.values()))
    missing = [tensor for tensor in ("down", "up") if tensor not in keys]
    if missing:
        raise LoraError(f"the key {key!r} has no partner: there is no {' and no '.join(missing)} for its layer")
    alias = find_layers(table, part, layer)
    if alias is None:
        known = "no such part" if part not in table.shapes else "no such layer"
        raise LoraError(f"the key {keys['down']!r} does not fit the model, which has {known}")
    shapes = [table.shapes[part][name] for name in alias.layers]
    rank = check_shapes(header, keys["down"], keys["up"], shapes)
    alpha = keys.get("alpha")
    if alpha and math.prod(header.tensors[alpha].shape) != 1:
        raise LoraError(f"the key {alpha!r} has the shape {list(header.tensors[alpha].shape)}: one number is expected")
    return Fitted(
        part=part,
        layers=alias.layers,
        num_outputs=tuple(shape.outputs for shape in shapes),
        down=keys["down"],
        up=keys["up"],
        alpha=alpha,
        rank=rank,
        settings_scale=settings_scale(settings, part, alias.layers[0], rank),
        swaps_halves=alias.swaps_halves,
    )


def find_layers(table: LayerTable, part: str, layer: str) -> Alias | None:
    """The layers that an underscored name stands for. Text encoders are named with and without `text_model`."""
    aliases = table.aliases.get(part, {})
    others = (f"text_model_{layer}", layer.removeprefix("text_model_")) if part != NETWORK else ()
    return next((aliases[name] for name in (layer, *others) if name in aliases), None)


def check_shapes(header: WeightsHeader, down: str, up: str, layers: Sequence[LayerShape]) -> int:
    """Check both tensors of a pair against the layers they patch. Returns the rank."""
    down_shape, up_shape = header.tensors[down].shape, header.tensors[up].shape
    inputs, outputs = layers[0].inputs, sum(layer.outputs for layer in layers)
    kernel = layers[0].kernel or (1, 1)
    rank = down_shape[0] if down_shape else 0
    flat = [(rank, inputs)] if kernel == (1, 1) else []
    if rank < 1 or down_shape not in [*flat, (rank, inputs, *kernel)]:
        wanted = f"[rank, {inputs}]" if flat else f"[rank, {inputs}, {kernel[0]}, {kernel[1]}]"
        raise LoraError(f"the key {down!r} has the shape {list(down_shape)}: {wanted} is expected")
    if up_shape not in [(outputs, rank), (outputs, rank, 1, 1)]:
        raise LoraError(f"the key {up!r} has the shape {list(up_shape)}: [{outputs}, {rank}] is expected")
    return rank


def name_layers(names: Mapping[str, LayerShape], foreign: Mapping[str, Alias]) -> dict[str, Alias]:
    """Aliases of a part: its own names, those that older files of diffusers have, and foreign ones."""
    own = {underscored(name): Alias((name,)) for name in names}
    older = {
        underscored(name.removesuffix(now) + before): Alias((name,))
        for name in names
        for now, before in OLDER.items()
        if name.endswith(now)
    }
    return {**foreign, **older, **own}


def read_settings(metadata: Mapping[str, str]) -> dict[str, Any]:
    try:
        settings = json.loads(metadata.get(METADATA, "{}"))
    except (ValueError, TypeError):
        return {}
    return settings if isinstance(settings, dict) else {}


def settings_scale(settings: Mapping[str, Any], part: str, layer: str, rank: int) -> float | None:
    """alpha / rank, or alpha / sqrt(rank) if the settings say so. Settings of a pipeline name the part before each."""
    starts = {NETWORK: ("unet.", "transformer.", "")}.get(part, (f"{part}.",))
    start = next((start for start in starts if f"{start}lora_alpha" in settings), None)
    if start is None:
        return None
    patterns = settings.get(f"{start}alpha_pattern") or {}
    found = [value for name, value in patterns.items() if layer == name or layer.endswith(f".{name}")]
    try:
        alpha = float(found[0] if found else settings[f"{start}lora_alpha"])
    except (TypeError, ValueError):
        raise LoraError(f"the settings of the file have no number for lora_alpha of {layer}") from None
    if not math.isfinite(alpha):
        raise LoraError(f"the settings of the file say lora_alpha {alpha} of {layer}: a finite number is expected")
    return alpha / (math.sqrt(rank) if settings.get(f"{start}use_rslora") else rank)

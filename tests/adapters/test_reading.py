"""LoRA files of every format give the same products; files that do not fit are refused by the first wrong key."""

import json
from pathlib import Path

import pytest
import torch
from helpers.loras import draw_pairs, load_lora, save_lora, write_header
from safetensors.torch import load_file, save_file
from torch import Tensor

from instgenie.adapters.files import open_lora
from instgenie.adapters.fitting import fit
from instgenie.adapters.keys import NETWORK
from instgenie.errors import LoraError
from instgenie.models.model import Model

ATTENTION = "down_blocks.0.attentions.0.transformer_blocks.0.attn1"


@pytest.fixture
def sdxl(models: dict[str, Model]) -> Model:
    return models["sdxl"]


@pytest.fixture
def flux(models: dict[str, Model]) -> Model:
    return models["blend_guided"]


def deltas(path: Path, model: Model) -> dict[tuple[str, str], Tensor]:
    return {name: low.delta for name, low in load_lora(path, model).layers.items()}


def check_same(found: dict[tuple[str, str], Tensor], expected: dict[tuple[str, str], Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, delta in expected.items():
        assert torch.allclose(found[name], delta, atol=1e-6), name


def save_kohya(path: Path, model: Model, original: dict[str, str], alpha: float = 2.0, part: str = NETWORK) -> Path:
    """The same tensors as `save_lora` draws, under the names of kohya."""
    shapes = model.layer_table.shapes[part]
    prefix = {NETWORK: "lora_unet", "text_encoder": "lora_te1", "text_encoder_2": "lora_te2"}[part]
    tensors = {}
    for name, (down, up) in draw_pairs(shapes, original.values(), 3, 0).items():
        old = next(old for old, new in original.items() if new == name)
        tensors[f"{prefix}_{old}.lora_down.weight"], tensors[f"{prefix}_{old}.lora_up.weight"] = down, up
        tensors[f"{prefix}_{old}.alpha"] = torch.tensor(alpha)
    save_file(tensors, path)
    return path


def test_kohya_with_the_names_of_diffusers(models: dict[str, Model], tmp_path: Path) -> None:
    for family in ("sd", "sd_fill", "sdxl"):
        model = models[family]
        names = list(model.layer_table.shapes[NETWORK])
        assert any(model.layer_table.shapes[NETWORK][name].kernel == (3, 3) for name in names)
        kohya = save_kohya(tmp_path / "k.safetensors", model, {name.replace(".", "_"): name for name in names})
        check_same(deltas(kohya, model), deltas(save_lora(tmp_path / "d.safetensors", model, names, alpha=2.0), model))


def test_kohya_with_the_original_names_of_sdxl(sdxl: Model, tmp_path: Path) -> None:
    original = {
        "input_blocks_0_0": "conv_in",
        "input_blocks_1_0_in_layers_2": "down_blocks.0.resnets.0.conv1",
        "input_blocks_2_0_op": "down_blocks.0.downsamplers.0.conv",
        "input_blocks_3_1_proj_in": "down_blocks.1.attentions.0.proj_in",
        "input_blocks_3_1_transformer_blocks_1_attn2_to_out_0": (
            "down_blocks.1.attentions.0.transformer_blocks.1.attn2.to_out.0"
        ),
        "middle_block_1_transformer_blocks_0_ff_net_2": "mid_block.attentions.0.transformer_blocks.0.ff.net.2",
        "middle_block_2_emb_layers_1": "mid_block.resnets.1.time_emb_proj",
        "output_blocks_0_0_skip_connection": "up_blocks.0.resnets.0.conv_shortcut",
        "output_blocks_1_1_transformer_blocks_0_attn1_to_k": (
            "up_blocks.0.attentions.1.transformer_blocks.0.attn1.to_k"
        ),
        "output_blocks_1_2_conv": "up_blocks.0.upsamplers.0.conv",
        "output_blocks_3_0_out_layers_3": "up_blocks.1.resnets.1.conv2",
        "label_emb_0_2": "add_embedding.linear_2",
        "time_embed_0": "time_embedding.linear_1",
        "out_2": "conv_out",
    }
    kohya = save_kohya(tmp_path / "k.safetensors", sdxl, original)
    own = save_lora(tmp_path / "d.safetensors", sdxl, list(original.values()), alpha=2.0)
    check_same(deltas(kohya, sdxl), deltas(own, sdxl))


def test_kohya_of_flux_splits_what_one_layer_computes(flux: Model, tmp_path: Path) -> None:
    """Q, K and V, and in single blocks the MLP, are rows of one matrix there."""
    generator = torch.Generator().manual_seed(0)
    width = 72

    def pair(stem: str, outputs: int) -> dict[str, Tensor]:
        return {
            f"{stem}.lora_down.weight": torch.randn(2, width, generator=generator),
            f"{stem}.lora_up.weight": torch.randn(outputs, 2, generator=generator),
            f"{stem}.alpha": torch.tensor(1.0),
        }

    tensors = pair("lora_unet_double_blocks_0_txt_attn_qkv", 3 * width)
    tensors |= pair("lora_unet_single_blocks_1_linear1", 7 * width)
    tensors |= pair("lora_unet_final_layer_adaLN_modulation_1", 2 * width)
    save_file(tensors, tmp_path / "k.safetensors")
    found = deltas(tmp_path / "k.safetensors", flux)

    def delta(stem: str) -> Tensor:
        return 0.5 * tensors[f"{stem}.lora_up.weight"] @ tensors[f"{stem}.lora_down.weight"]

    qkv = delta("lora_unet_double_blocks_0_txt_attn_qkv")
    mlp = delta("lora_unet_single_blocks_1_linear1")
    block, single = "transformer_blocks.0.attn", "single_transformer_blocks.1"
    shift, scale = delta("lora_unet_final_layer_adaLN_modulation_1").chunk(2)
    expected = {
        f"{block}.add_q_proj": qkv[:width],
        f"{block}.add_k_proj": qkv[width : 2 * width],
        f"{block}.add_v_proj": qkv[2 * width :],
        f"{single}.attn.to_q": mlp[:width],
        f"{single}.attn.to_k": mlp[width : 2 * width],
        f"{single}.attn.to_v": mlp[2 * width : 3 * width],
        f"{single}.proj_mlp": mlp[3 * width :],
        "norm_out.linear": torch.cat([scale, shift]),  # diffusers has them the other way round
    }
    check_same(found, {(NETWORK, name): value for name, value in expected.items()})
    shared = load_lora(tmp_path / "k.safetensors", flux)
    assert shared.num_bytes < 4 * (sum(map(Tensor.numel, tensors.values())) + 16 * len(tensors))  # down is there once


def test_kohya_of_stable_diffusion_3(models: dict[str, Model], tmp_path: Path) -> None:
    """Here, too, Q, K and V are one matrix; the text of the last block has a scale before its shift in diffusers."""
    model, generator = models["sd3"], torch.Generator().manual_seed(0)
    width, last = 32, 2
    stems = {
        f"joint_blocks_{last}_context_block_adaLN_modulation_1": (width, 2 * width),
        "joint_blocks_0_context_block_adaLN_modulation_1": (width, 6 * width),
        "joint_blocks_0_x_block_attn2_qkv": (width, 3 * width),
        "joint_blocks_1_context_block_mlp_fc2": (4 * width, width),
        "y_embedder_mlp_0": (24, width),
    }
    tensors = {"lora_unet_x_embedder_proj.lora_down.weight": torch.randn(2, 16, 2, 2, generator=generator)}
    tensors |= {"lora_unet_x_embedder_proj.lora_up.weight": torch.randn(width, 2, 1, 1, generator=generator)}
    for stem, (inputs, outputs) in stems.items():
        tensors[f"lora_unet_{stem}.lora_down.weight"] = torch.randn(2, inputs, generator=generator)
        tensors[f"lora_unet_{stem}.lora_up.weight"] = torch.randn(outputs, 2, generator=generator)
    save_file(tensors, tmp_path / "k.safetensors")

    def delta(stem: str) -> Tensor:
        up, down = (tensors[f"lora_unet_{stem}.lora_{one}.weight"].flatten(1) for one in ("up", "down"))
        return up @ down

    shift, scale = delta(f"joint_blocks_{last}_context_block_adaLN_modulation_1").chunk(2)
    q, k, v = delta("joint_blocks_0_x_block_attn2_qkv").chunk(3)
    expected = {
        f"transformer_blocks.{last}.norm1_context.linear": torch.cat([scale, shift]),
        "transformer_blocks.0.norm1_context.linear": delta("joint_blocks_0_context_block_adaLN_modulation_1"),
        "transformer_blocks.0.attn2.to_q": q,
        "transformer_blocks.0.attn2.to_k": k,
        "transformer_blocks.0.attn2.to_v": v,
        "transformer_blocks.1.ff_context.net.2": delta("joint_blocks_1_context_block_mlp_fc2"),
        "time_text_embed.text_embedder.linear_1": delta("y_embedder_mlp_0"),
        "pos_embed.proj": delta("x_embedder_proj").view(width, 16, 2, 2),
    }
    check_same(deltas(tmp_path / "k.safetensors", model), {(NETWORK, name): one for name, one in expected.items()})


def test_original_names_of_z_image(models: dict[str, Model], tmp_path: Path) -> None:
    """One matrix of Q, K and V; the names of other layers are those of diffusers, or nearly."""
    model, width = models["zimage"], 48
    stems = {
        "layers_1_attention_qkv": (width, 3 * width),
        "noise_refiner_0_attention_out": (width, width),
        "context_refiner_0_feed_forward_w1": (width, 128),
        "layers_0_adaLN_modulation_0": (width, 4 * width),
        "final_layer_linear": (width, 16),
    }
    tensors = {}
    for stem, (inputs, outputs) in stems.items():
        tensors[f"lora_unet_{stem}.lora_down.weight"] = torch.randn(2, inputs)
        tensors[f"lora_unet_{stem}.lora_up.weight"] = torch.randn(outputs, 2)
    save_file(tensors, tmp_path / "k.safetensors")

    def delta(stem: str) -> Tensor:
        return tensors[f"lora_unet_{stem}.lora_up.weight"] @ tensors[f"lora_unet_{stem}.lora_down.weight"]

    q, k, v = delta("layers_1_attention_qkv").chunk(3)
    expected = {
        "layers.1.attention.to_q": q,
        "layers.1.attention.to_k": k,
        "layers.1.attention.to_v": v,
        "noise_refiner.0.attention.to_out.0": delta("noise_refiner_0_attention_out"),
        "context_refiner.0.feed_forward.w1": delta("context_refiner_0_feed_forward_w1"),
        "layers.0.adaLN_modulation.0": delta("layers_0_adaLN_modulation_0"),
        "all_final_layer.2-1.linear": delta("final_layer_linear"),
    }
    check_same(deltas(tmp_path / "k.safetensors", model), {(NETWORK, name): one for name, one in expected.items()})


@pytest.mark.parametrize(("family", "part"), [("blend_guided", "text_encoder_2"), ("sd3", "text_encoder_3")])
def test_the_third_encoder_of_kohya_is_the_t5(models: dict[str, Model], tmp_path: Path, family: str, part: str) -> None:
    name = "encoder.block.0.layer.0.SelfAttention.q"
    own = save_lora(tmp_path / "d.safetensors", models[family], [name], part=part)
    [(_, down), (_, up)] = sorted(load_file(own).items())
    stem = f"lora_te3_{name.replace('.', '_')}"
    save_file({f"{stem}.lora_down.weight": down, f"{stem}.lora_up.weight": up}, tmp_path / "k.safetensors")
    check_same(deltas(tmp_path / "k.safetensors", models[family]), deltas(own, models[family]))


@pytest.mark.parametrize("prefix", ["transformer.", "base_model.model.", "base_model.model.transformer.", ""])
def test_prefixes_of_peft(flux: Model, tmp_path: Path, prefix: str) -> None:
    own = save_lora(tmp_path / "d.safetensors", flux, ["transformer_blocks.0.attn.to_q", "proj_out"])
    renamed = {key.replace("transformer.", prefix, 1): value for key, value in load_file(own).items()}
    save_file(renamed, tmp_path / "p.safetensors")
    check_same(deltas(tmp_path / "p.safetensors", flux), deltas(own, flux))


def test_files_of_diffusers_before_peft(models: dict[str, Model], tmp_path: Path) -> None:
    model = models["sd"]
    own = save_lora(tmp_path / "d.safetensors", model, [f"{ATTENTION}.to_q", f"{ATTENTION}.to_out.0"])
    tensors = load_file(own)
    older = {
        key.replace("attn1.", "attn1.processor.")
        .replace(".to_out.0", ".to_out")
        .replace(".lora_A.", "_lora.down.")
        .replace(".lora_B.", "_lora.up."): value
        for key, value in tensors.items()
    }
    assert all("processor" in key for key in older)
    save_file(older, tmp_path / "o.safetensors")
    check_same(deltas(tmp_path / "o.safetensors", model), deltas(own, model))


def test_text_encoders_are_patched_too(sdxl: Model, tmp_path: Path) -> None:
    first = {f"text_model_{name.replace('.', '_')}": name for name in ["encoder.layers.0.self_attn.q_proj"]}
    second = {"text_model_encoder_layers_1_mlp_fc1": "text_model.encoder.layers.1.mlp.fc1"}
    for part, names in (("text_encoder", first), ("text_encoder_2", second)):
        kohya = save_kohya(tmp_path / "k.safetensors", sdxl, names, part=part)
        own = save_lora(tmp_path / "d.safetensors", sdxl, list(names.values()), alpha=2.0, part=part)
        check_same(deltas(kohya, sdxl), deltas(own, sdxl))


def test_alpha_from_the_settings(flux: Model, tmp_path: Path) -> None:
    """diffusers writes PEFT's settings into the file, PEFT beside it."""
    name = "transformer_blocks.0.attn.to_q"
    own = save_lora(tmp_path / "d.safetensors", flux, [name, "proj_out"], rank=4)
    plain, tensors = deltas(own, flux), load_file(own)
    settings = {"r": 4, "lora_alpha": 8, "alpha_pattern": {"attn.to_q": 2}}
    inside = {"lora_adapter_metadata": json.dumps({f"transformer.{key}": value for key, value in settings.items()})}
    save_file(tensors, tmp_path / "m.safetensors", metadata=inside)
    folder = tmp_path / "peft"
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    for path in (tmp_path / "m.safetensors", folder):
        found = deltas(path, flux)
        assert torch.allclose(found[NETWORK, "proj_out"], 2 * plain[NETWORK, "proj_out"])
        assert torch.allclose(found[NETWORK, name], 0.5 * plain[NETWORK, name])
    (folder / "adapter_config.json").write_text(json.dumps(settings | {"use_rslora": True}))
    assert torch.allclose(deltas(folder, flux)[NETWORK, "proj_out"], 4 * plain[NETWORK, "proj_out"])
    (folder / "adapter_config.json").write_text(json.dumps(settings | {"use_dora": True}))
    with pytest.raises(LoraError, match="DoRA"):
        load_lora(folder, flux)


Q = f"unet.{ATTENTION}.to_q"
GOOD = {f"{Q}.lora_A.weight": torch.zeros(2, 16), f"{Q}.lora_B.weight": torch.zeros(16, 2)}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            GOOD | {"unet.nowhere.lora_A.weight": torch.zeros(2, 16)},
            "nowhere.lora_A.weight' has no partner.*no up",
        ),
        (
            {"unet.nowhere.lora_A.weight": torch.zeros(2, 16), "unet.nowhere.lora_B.weight": torch.zeros(16, 2)},
            "'unet.nowhere.lora_A.weight' does not fit the model, which has no such layer",
        ),
        (
            GOOD | {f"{Q}.lora_A.weight": torch.zeros(2, 17)},
            r"lora_A.weight' has the shape \[2, 17\]: \[rank, 16\]",
        ),
        (GOOD | {f"{Q}.lora_B.weight": torch.zeros(16, 3)}, r"to_q.lora_B.weight' has the shape \[16, 3\]: \[16, 2\]"),
        (GOOD | {f"{Q}.alpha": torch.zeros(2)}, r"alpha' has the shape \[2\]: one number"),
        (GOOD | {f"{Q}.dora_scale": torch.zeros(16)}, "dora_scale' belongs to DoRA, which is not supported"),
        (GOOD | {f"{Q}.hada_w1_a": torch.zeros(2)}, "LoHa"),
        (GOOD | {"epoch": torch.zeros(2)}, "'epoch' is not one of a LoRA"),
        (
            {key.replace("unet", "text_encoder_2"): value for key, value in GOOD.items()},
            "text_encoder_2.*which has no such part",
        ),
        (GOOD | {f"{Q}.lora_A.weight": torch.full((2, 16), float("nan"))}, "lora_A.weight' has 32 of 32 values"),
        (GOOD | {f"{Q}.lora_B.weight": torch.full((16, 2), float("inf"))}, "lora_B.weight' has 32 of 32 values"),
        (GOOD | {f"{Q}.alpha": torch.tensor(float("nan"))}, "alpha' is nan: a finite number"),
        (GOOD | {f"{Q}.lora_A.weight": torch.zeros(2, 16, dtype=torch.int32)}, "to_q.lora_A.weight' is in I32"),
    ],
)
def test_wrong_files_are_refused_by_key(
    models: dict[str, Model], tmp_path: Path, tensors: dict[str, Tensor], message: str
) -> None:
    save_file(tensors, tmp_path / "bad.safetensors")
    with pytest.raises(LoraError, match=message):
        load_lora(tmp_path / "bad.safetensors", models["sd"])


def test_damaged_files_are_refused(models: dict[str, Model], tmp_path: Path) -> None:
    model, path = models["sd"], tmp_path / "x.safetensors"
    good = save_lora(tmp_path / "good.safetensors", model, [f"{ATTENTION}.to_q"]).read_bytes()
    cases = {
        good[:-7]: r"truncated: .* ends at byte \d+ of \d+",
        good[:5]: "not a whole safetensors file: it has 5 bytes",
        b"": "0 bytes",
        b"\xff" * 100: "not a whole safetensors file",
        (4).to_bytes(8, "little") + b"nope": "header is not JSON",
        (2).to_bytes(8, "little") + b"[]": "its header is a list",
        (2).to_bytes(8, "little") + b"{}": "no tensors",
    }
    for content, message in cases.items():
        path.write_bytes(content)
        with pytest.raises(LoraError, match=message):
            load_lora(path, model)
    entry = {"dtype": "F32", "shape": [2, 16], "data_offsets": [0, 128]}
    lies = [{"shape": [2, 2**40]}, {"shape": [-2, -16]}, {"data_offsets": [0, 64]}, {"data_offsets": [128, 0]}]
    for lie in [*lies, {"dtype": "F16"}, {"shape": "all"}, {"data_offsets": None}]:
        with pytest.raises(LoraError, match=r"damaged|malformed"):
            open_lora(write_header(path, {f"{Q}.lora_A.weight": entry | lie}, bytes(128)))
    for other in (tmp_path / "x.bin", tmp_path / "missing.safetensors", tmp_path):
        if other.suffix == ".bin":
            other.write_bytes(good)
        with pytest.raises(LoraError, match=r"safetensors file|does not exist|2 safetensors files"):
            open_lora(other)


def test_a_header_is_enough_to_refuse(models: dict[str, Model], tmp_path: Path) -> None:
    """No byte of the weights is read: a sparse file of 100 GB is refused at once."""
    num = 25 * 10**9
    entry = {"dtype": "F32", "shape": [1, num], "data_offsets": [0, 4 * num]}
    path = write_header(tmp_path / "x.safetensors", {f"{Q}.lora_A.weight": entry})
    with open(path, "ab") as file:
        file.truncate(path.stat().st_size + 4 * num)
    with pytest.raises(LoraError, match="no partner"):
        fit(open_lora(path).header, models["sd"].layer_table)


def test_a_version_follows_the_file(models: dict[str, Model], tmp_path: Path) -> None:
    path = save_lora(tmp_path / "x.safetensors", models["sd"], [f"{ATTENTION}.to_q"], seed=0)
    first = open_lora(path).version
    assert first == open_lora(path).version
    assert first != open_lora(save_lora(path, models["sd"], [f"{ATTENTION}.to_q"], seed=1)).version


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"dtype": "F32", "shape": [2, 16], "data_offsets": [0.0, 128.0]}, "malformed"),
        ({"dtype": "F32", "shape": [1e999, 16], "data_offsets": [0, 128]}, "malformed"),
        ({"dtype": "F32", "shape": [10**4000, 16], "data_offsets": [0, 128]}, "malformed"),
        ({"dtype": "F32", "shape": [2**62, 16], "data_offsets": [0, 128]}, "malformed"),
        ({"dtype": "F32", "shape": [-2, 16], "data_offsets": [0, 128]}, "malformed"),
        ({"dtype": "F32", "shape": [2, 16], "data_offsets": [128, 0]}, "malformed"),
    ],
)
def test_headers_with_impossible_numbers_are_refused(
    models: dict[str, Model], tmp_path: Path, about: dict[str, object], message: str
) -> None:
    path = write_header(tmp_path / "bad.safetensors", {f"{Q}.lora_A.weight": about}, bytes(128))
    with pytest.raises(LoraError, match=message):
        load_lora(path, models["sd"])


def test_tensors_may_not_share_bytes(models: dict[str, Model], tmp_path: Path) -> None:
    """Else a small file would fill the memory of a machine."""
    names = [name for name, shape in models["sd"].layer_table.shapes[NETWORK].items() if shape[:2] == (16, 16)]
    about = {"dtype": "F32", "shape": [2, 16], "data_offsets": [0, 128]}
    wide = {"dtype": "F32", "shape": [16, 2], "data_offsets": [0, 128]}
    header = {f"unet.{name}.lora_{side}.weight": one for name in names for side, one in (("A", about), ("B", wide))}
    path = write_header(tmp_path / "bad.safetensors", header, bytes(128))
    with pytest.raises(LoraError, match=rf"its tensors take {2 * 128 * len(names):,} bytes, but it has 128"):
        load_lora(path, models["sd"])


def test_a_deep_header_is_refused(models: dict[str, Model], tmp_path: Path) -> None:
    content = b"[" * 200_000
    (tmp_path / "bad.safetensors").write_bytes(len(content).to_bytes(8, "little") + content)
    with pytest.raises(LoraError, match="not JSON"):
        load_lora(tmp_path / "bad.safetensors", models["sd"])


def test_settings_without_a_finite_alpha_are_refused(models: dict[str, Model], tmp_path: Path) -> None:
    path = save_lora(tmp_path / "good.safetensors", models["sd"], [f"{ATTENTION}.to_q"])
    save_file(load_file(path), path, {"lora_adapter_metadata": '{"unet.lora_alpha": Infinity}'})
    with pytest.raises(LoraError, match=r"lora_alpha inf .* a finite number is expected"):
        load_lora(path, models["sd"])

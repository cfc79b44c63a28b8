"""Every product over packed rows goes through one function, which sees whose rows they are."""

from collections.abc import Sequence

import pytest
import torch
from helpers.edits import make_edit
from torch import Tensor, nn

from instgenie.engine.prepare import prepare
from instgenie.engine.register import register, reuse
from instgenie.jobs.activations import Kind
from instgenie.jobs.job import Job
from instgenie.models.flux import network as flux_network
from instgenie.models.flux2 import network as flux2_network
from instgenie.models.joint import block as joint_block
from instgenie.models.joint import modulation
from instgenie.models.joint import network as joint_network
from instgenie.models.joint.batch import JointBatch
from instgenie.models.layers import feed_forward, resnet
from instgenie.models.layers.linear import EACH_BRANCH, Owners, linear
from instgenie.models.model import Model
from instgenie.models.qwen import network as qwen_network
from instgenie.models.sd3 import network as sd3_network
from instgenie.models.unet import flow as unet_flow
from instgenie.models.unet import network as unet_network
from instgenie.models.unet.batch import UnetBatch
from instgenie.models.zimage import network as zimage_network

OUTSIDE = (
    "time_text_embed",
    "time_guidance_embed",
    "time_embedding",
    "add_embedding",
    "t_embedder",
)  # embed the time, before any row is packed


class Recording:
    """Stands in for `linear` and `linears` and notes each layer with the owners of its rows."""

    def __init__(self) -> None:
        self.seen: list[tuple[nn.Module, list[int] | None]] = []

    def __call__(self, layer: nn.Module, rows: Tensor, owners: Owners | None) -> Tensor:
        branches = None if owners is None else owners.branches(rows)
        assert branches is None or branches.shape == (rows.shape[:-1].numel(),)
        self.seen.append((layer, None if branches is None else branches.tolist()))
        return linear(layer, rows, owners)

    def several(self, layers: Sequence[nn.Module], rows: Tensor, owners: Owners | None) -> list[Tensor]:
        return [self(layer, rows, owners) for layer in layers]

    def owners_of(self, layer: nn.Module) -> list[list[int] | None]:
        return [owners for one, owners in self.seen if one is layer]


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Recording:
    recording = Recording()
    joint = (
        joint_block,
        joint_network,
        modulation,
        flux_network,
        flux2_network,
        qwen_network,
        sd3_network,
        zimage_network,
    )
    for module in (*joint, unet_network, unet_flow, feed_forward, resnet):
        monkeypatch.setattr(module, "linear", recording)
    for module in (joint_block, flux_network, zimage_network, unet_flow):
        monkeypatch.setattr(module, "linears", recording.several)
    return recording


def make_jobs(model: Model, kind: Kind, true_guidance: float = 2.0) -> list[Job]:
    edits = [make_edit(size=(32, 32), steps=2, share=share, true_guidance=true_guidance) for share in (0.2, 0.5)]
    return [
        reuse(prepare(edit, model), register(edit.picture, model, edit.size, edit.steps, edit.guidance, kind))
        for edit in edits
    ]


def repeat(counts: list[int]) -> list[int]:
    """(2, 3) -> [0, 0, 1, 1, 1]"""
    return [branch for branch, count in enumerate(counts) for _ in range(count)]


@torch.inference_mode()
@pytest.mark.parametrize("family", ["blend_guided", "fill", "sd", "sdxl", "sd3", "klein", "qwen", "zimage"])
def test_every_linear_layer_is_seen(models: dict[str, Model], family: str, recording: Recording) -> None:
    model = models[family]
    jobs = make_jobs(model, "kv")
    recording.seen.clear()
    called = set()
    inside = {name: one for name, one in model.network.named_modules() if not name.startswith(OUTSIDE)}
    layers = [one for one in inside.values() if isinstance(one, nn.Linear)]
    hooks = [layer.register_forward_hook(lambda layer, *_: called.add(layer)) for layer in layers]
    model.predict(jobs)
    for hook in hooks:
        hook.remove()
    assert called
    assert called <= {layer for layer, _ in recording.seen}


@torch.inference_mode()
def test_owners_in_a_flux(models: dict[str, Model], recording: Recording) -> None:
    model = models["blend_guided"]
    jobs = make_jobs(model, "kv")
    recording.seen.clear()
    packed = model.pack(jobs)
    assert isinstance(packed, JointBatch)
    model.run(packed)
    steps = [job.num_steps for job in jobs for _ in job.branches]  # modulated by one product per layer
    texts = [len(branch.text) for job in jobs for branch in job.branches]
    images = [len(job.inside) for job in jobs for _ in job.branches]
    joint = [text + image for text, image in zip(texts, images, strict=True)]
    assert len(texts) == 4
    double, single = model.network.transformer_blocks[0], model.network.single_transformer_blocks[0]
    of_text = [double.attn.add_q_proj, double.attn.add_k_proj, double.attn.add_v_proj, double.attn.to_add_out]
    of_text += [double.ff_context.net[0].proj, double.ff_context.net[2]]
    of_image = [double.attn.to_q, double.attn.to_k, double.attn.to_v, double.attn.to_out[0]]
    of_image += [double.ff.net[0].proj, double.ff.net[2], model.network.x_embedder, model.network.proj_out]
    of_joint = [single.attn.to_q, single.attn.to_k, single.attn.to_v, single.proj_mlp, single.proj_out]
    of_branches = [double.norm1.linear, double.norm1_context.linear, single.norm.linear, model.network.norm_out.linear]
    for layers, counts in ((of_text, texts), (of_image, images), (of_joint, joint), (of_branches, steps)):
        for layer in layers:
            assert recording.owners_of(layer) == [repeat(counts)]
    own = {layer for block in (double, single) for layer in block.modules() if isinstance(layer, nn.Linear)}
    assert own <= {*of_text, *of_image, *of_joint, *of_branches}


@torch.inference_mode()
def test_rows_of_a_template_have_no_owner(models: dict[str, Model], recording: Recording) -> None:
    model = models["blend_guided"]
    jobs = make_jobs(model, "y")
    recording.seen.clear()
    model.predict(jobs)
    block = model.network.transformer_blocks[0]
    for layer in (block.attn.to_k, block.attn.to_v, block.norm1.linear):
        assert sorted(owners is None for owners in recording.owners_of(layer)) == [False, True, True]
    assert None not in recording.owners_of(block.attn.to_q)


@torch.inference_mode()
@pytest.mark.parametrize("pads", [False, True])
def test_owners_in_a_unet(models: dict[str, Model], recording: Recording, pads: bool) -> None:
    model = models["sdxl"]
    jobs = make_jobs(model, "kv")
    recording.seen.clear()
    packed = model.pack(jobs, pads)
    assert isinstance(packed, UnetBatch)
    model.run(packed)
    position = next(iter(model.positions.values()))
    transformer = next(iter(model.positions))
    num_all = len(jobs[0].masked) // position.side**2
    layout = packed.layout(position.block, num_all)
    assert layout.index is not None
    computed = (layout.index // num_all).tolist()
    assert len(set(computed)) == 4
    assert pads or computed == repeat([len(job.level(num_all).inside) for job in jobs for _ in job.branches])
    block = transformer.transformer_blocks[0]
    layers = [transformer.proj_in, transformer.proj_out, block.ff.net[0].proj, block.ff.net[2]]
    layers += [block.attn1.to_q, block.attn1.to_k, block.attn1.to_v, block.attn1.to_out[0]]
    layers += [block.attn2.to_q, block.attn2.to_out[0]]
    assert all(recording.owners_of(layer) == [computed] for layer in layers)
    texts = repeat([len(branch.text) for job in jobs for branch in job.branches])
    assert recording.owners_of(block.attn2.to_k) == recording.owners_of(block.attn2.to_v) == [texts]
    own = {layer for layer in block.modules() if isinstance(layer, nn.Linear)}
    assert own <= {*layers, block.attn2.to_k, block.attn2.to_v}
    times = [one for one in model.network.modules() if isinstance(one, resnet.ResnetBlock2D)]
    assert all(recording.owners_of(one.time_emb_proj) == [[0, 1, 2, 3]] for one in times)


def test_a_convolution_of_one_by_one_is_a_product() -> None:
    conv, pixels = nn.Conv2d(3, 5, 1), torch.randn(2, 3, 4, 6)
    rows = pixels.permute(0, 2, 3, 1).flatten(0, 2)
    expected = conv(pixels).permute(0, 2, 3, 1).flatten(0, 2)
    torch.testing.assert_close(linear(conv, rows, Owners(per_branch=24)), expected)
    assert Owners(per_branch=24).branches(rows).tolist() == [0] * 24 + [1] * 24
    assert EACH_BRANCH.branches(torch.zeros(3, 1)).tolist() == [0, 1, 2]

"""diffusers' feed-forward layers, product by product over packed rows."""

from diffusers.models.activations import GEGLU, GELU
from diffusers.models.attention import FeedForward
from diffusers.models.transformers.transformer_flux2 import Flux2FeedForward
from torch import Tensor, nn

from instgenie.kernels.geglu import geglu
from instgenie.kernels.gelu import gelu
from instgenie.kernels.quantize import Rows
from instgenie.kernels.swiglu import swiglu
from instgenie.models.layers.fp8_linear import reads_fp8
from instgenie.models.layers.linear import Owners, linear


def feed_forward(ff: nn.Module, inner: Rows, owners: Owners | None) -> Tensor:
    """[rows, width] -> [rows, width]. What is not diffusers' own layer, or has an activation of another kind, is called
    as a whole, as if it were one product."""
    if isinstance(ff, Flux2FeedForward):
        gated = swiglu(linear(ff.linear_in, inner, owners), reads_fp8(ff.linear_out))
        return linear(ff.linear_out, gated, owners)
    if not isinstance(ff, FeedForward):
        return linear(ff, inner, owners)
    activation, dropout, project, *others = ff.net
    fp8 = reads_fp8(project)
    if isinstance(activation, GEGLU):
        fed = geglu(linear(activation.proj, inner, owners), fp8)
    elif isinstance(activation, GELU) and fp8 and activation.approximate == "tanh":
        fed = gelu(linear(activation.proj, inner, owners), fp8)
    elif isinstance(activation, GELU):
        fed = activation.gelu(linear(activation.proj, inner, owners))
    else:
        fed = linear(activation, inner, owners)
    out = linear(project, dropout(fed) if isinstance(fed, Tensor) else fed, owners)
    for layer in others:
        out = layer(out)
    return out


def first_layer(ff: nn.Module) -> nn.Module:
    """The layer that reads the rows of a feed-forward layer."""
    if isinstance(ff, Flux2FeedForward):
        layer: nn.Module = ff.linear_in
        return layer
    activation = ff.net[0] if isinstance(ff, FeedForward) else ff
    return activation.proj if isinstance(activation, GEGLU | GELU) else activation

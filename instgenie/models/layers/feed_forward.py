"""diffusers' feed-forward layer, product by product over packed rows."""

from diffusers.models.activations import GEGLU, GELU
from diffusers.models.attention import FeedForward
from torch import Tensor, nn

from instgenie.kernels.geglu import geglu
from instgenie.models.layers.linear import Owners, linear


def feed_forward(ff: nn.Module, inner: Tensor, owners: Owners) -> Tensor:
    """[rows, width] -> [rows, width]. What is not diffusers' own layer, or has an activation of another kind, is called
    as a whole, as if it were one product."""
    if not isinstance(ff, FeedForward):
        return linear(ff, inner, owners)
    activation, dropout, project, *others = ff.net
    if isinstance(activation, GEGLU):
        fed = geglu(linear(activation.proj, inner, owners))
    elif isinstance(activation, GELU):
        fed = activation.gelu(linear(activation.proj, inner, owners))
    else:
        fed = linear(activation, inner, owners)
    fed = linear(project, dropout(fed), owners)
    for layer in others:
        fed = layer(fed)
    return fed

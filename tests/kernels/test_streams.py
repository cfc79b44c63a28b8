"""Work beside other work: in a captured graph on two streams, elsewhere one after the other."""

import pytest
import torch
from torch import Tensor

from instgenie.kernels.streams import beside


def test_one_after_the_other_where_nothing_is_captured() -> None:
    order: list[str] = []
    assert beside(lambda: order.append("first"), lambda: order.append("second"), torch.zeros(1)) == (None, None)
    assert order == ["first", "second"]


@pytest.mark.gpu
def test_captured_work_is_ordered_with_what_is_before_and_after() -> None:
    """Long chains of work that reuse memory, again and again: every value is as if all had run in a row."""
    x = torch.randn(512, 512, device="cuda")
    weight = torch.randn(512, 512, device="cuda") / 512**0.5

    def chain(start: Tensor, sign: float) -> Tensor:
        for _ in range(4):
            start = torch.tanh(start @ weight) * sign + start
        return start

    def run() -> Tensor:
        one, other = x + 0, x + 1
        for _ in range(8):
            first, second = one, other
            one, other = beside(lambda f=first: chain(f, 1.0), lambda s=second: chain(s, -1.0), x)  # type: ignore[misc]
            one, other = one - other, one + other
        return one + other

    expected = run()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(3):
        graph.replay()
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-3)

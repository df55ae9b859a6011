"""A trace holds about one layer while it runs, and nothing afterwards, without the garbage collector's help."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sqrtdk
from tests.attentions.cases import CASES
from tests.attentions.each import each

WIDTH, LENGTH, LAYERS = 32, 48, 12


class Block(nn.Module):
    """A residual attention."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if self.how == "sdpa":
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
            y = (q * 0.25 @ k.mT).masked_fill(hidden, -torch.inf).softmax(-1) @ v
        return x + self.out(y.transpose(1, 2).flatten(2))


@pytest.fixture(autouse=True)
def _without_collector() -> Iterator[None]:
    """Reference counts alone must free what a trace let go; `live` lists only what was made since."""
    gc.disable()
    gc.freeze()
    yield
    gc.unfreeze()
    gc.enable()


def live() -> list[Tensor]:
    """Tensors that exist and were made since the test began."""
    # By type: isinstance would ask lazy modules for their class, which wakes them.
    return [item for item in gc.get_objects() if issubclass(type(item), Tensor)]


def live_bytes() -> int:
    """Bytes of all tensors that exist, each storage once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in live()}
    return sum(storages.values())


@each("how", ["eager", "sdpa"])
def test_layers_are_let_go_as_the_model_goes_on(how: str) -> None:
    """What lives at the start of each layer does not grow with the layers, and is at most one layer more than plain."""
    model = nn.Sequential(*(Block(how) for _ in range(LAYERS)))
    x = torch.randn(2, LENGTH, WIDTH)
    held: list[int] = []
    for block in model:
        block.register_forward_pre_hook(lambda module, args: held.append(live_bytes()))
    with torch.no_grad():
        model(x)
    plain, held = held, []
    with torch.no_grad(), sqrtdk.trace(model) as run:
        model(x)
    assert len(run.calls) == len(held) == LAYERS
    one_layer = 2 * LENGTH * (6 * WIDTH + 4 * 4 * LENGTH) * 4  # q, k, v, x, y, out; four tensors of logits' size
    assert max(plain) == plain[-1]
    assert held[-1] <= held[2] + LENGTH * WIDTH
    assert max(held) - max(plain) <= one_layer


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", CASES)
def test_nothing_is_held_after_the_block(name: str) -> None:
    """The finished trace holds records and no tensor; what the model made is gone with the last reference."""
    made = CASES[name]()
    made.run()  # what torch caches on the first call is not the trace's
    before = {id(t) for t in live()}
    with torch.no_grad(), sqrtdk.trace(made.model) as run:
        made.run()
    left = [t for t in live() if id(t) not in before]
    assert [tuple(t.shape) for t in left] == []
    assert run.calls or run.not_measured


@each("name", ["matmul", "sdpa", "rope_in_slices", "mha_weights", "k_q_transposed"])
def test_an_autograd_graph_dies_with_its_output(name: str) -> None:
    made = CASES[name]()
    before = {id(t) for t in live()}
    with sqrtdk.trace(made.model):
        output = made.run()
    del output
    assert [tuple(t.shape) for t in live() if id(t) not in before] == []


def test_a_model_that_raised_is_let_go() -> None:
    model = Block("eager")
    x = torch.randn(1, LENGTH + 1, WIDTH)  # the mask does not fit
    before = {id(t) for t in live()}
    run = sqrtdk.trace(model)
    try:
        with run:
            model(x)
    except RuntimeError:
        pass
    assert [tuple(t.shape) for t in live() if id(t) not in before] == []


def test_the_trace_does_not_keep_the_inputs() -> None:
    model = Block("sdpa")
    x = torch.randn(1, LENGTH, WIDTH)
    gone = weakref.ref(x)
    with torch.no_grad(), sqrtdk.trace(model) as run:
        model(x)
        del x
        assert gone() is None
    assert len(run.calls) == 1

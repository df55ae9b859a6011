"""A graph that runs is a module: its laws, its values, the first module that differs, and steps that nobody reads."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import sqrtdk
from sqrtdk.graphs import read_exported
from sqrtdk.graphs.onnx import open_onnx
from tests.graphs.files import onnx
from tests.graphs.modules import exported

make = onnx.helper.make_node
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
X = torch.linspace(-1, 1, 2 * 5 * 8).sin().reshape(2, 5, 8)


class Stack(nn.Module):
    """Two layers of attention and a feed-forward part.

    Args:
        act: activation of the feed-forward part.
        mixes: whether a sample gets the mean of all.
        counts: where the number of elements over a bound is added: "x", between the parts, or "q", a factor of q.
    """

    def __init__(self, *, act: nn.Module | None = None, mixes: bool = False, counts: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer(act or nn.GELU(), counts) for _ in range(2)])
        self.mixes = mixes

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x + x.mean(0, keepdim=True) if self.mixes else x


class Layer(nn.Module):
    def __init__(self, act: nn.Module, counts: str) -> None:
        super().__init__()
        self.attn, self.up, self.act, self.down = Attention(counts == "q"), nn.Linear(8, 16), act, nn.Linear(16, 8)
        self.counts = counts == "x"

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        if self.counts:
            x = x + torch.nonzero(x > 0).sum()
        made: Tensor = x + self.down(self.act(self.up(x)))
        return made


class Attention(nn.Module):
    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.counts = counts

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x) * torch.nonzero(x > 0).sum() if self.counts else self.q(x)
        z = (8**-0.5 * q @ self.k(x).mT).masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), float("-inf"))
        made: Tensor = self.out(z.softmax(-1) @ self.v(x))
        return made


def _file(model: nn.Module, folder: Path, kind: str) -> Path:
    return exported(model.eval(), (X,), folder / f"m{kind}")


KINDS = [".pt2", pytest.param(".onnx", marks=pytest.mark.full)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_gives_what_its_model_gives_in_its_modules(kind: str, tmp_path: Path) -> None:
    model = Stack()
    path = _file(model, tmp_path, kind)
    module = read_exported(path).module if kind == ".pt2" else open_onnx(path, (X,)).loaded.module
    assert {name for name, _ in model.named_parameters()} == {name for name, _ in module.named_parameters()}
    assert type(module.get_submodule("layers.1.attn")).__name__ == "Attention"
    for wide in (False, True):
        own, twin, x = (one.double() if wide else one for one in (copy.deepcopy(model), copy.deepcopy(module), X))
        (made,) = twin(x).values() if kind == ".onnx" else (twin(x),)
        eps = 1e-14 if wide and kind == ".pt2" else torch.finfo(torch.float32).eps  # ONNX holds the scale in float32
        torch.testing.assert_close(made, own(x), rtol=0, atol=eps if wide else 8 * eps)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("mixes", "state"), [(False, "kept"), (True, "broken")])
def test_the_laws_are_asked_of_a_graph_that_runs(kind: str, mixes: bool, state: str, tmp_path: Path) -> None:
    path = _file(Stack(mixes=mixes), tmp_path, kind)
    save_file({"x": X}, tmp_path / "x.safetensors")
    report = sqrtdk.check(str(path), input_file=tmp_path / "x.safetensors", laws="finite,samples,parameters")
    assert [answer.state for answer in report.laws if answer.law in ("finite", "samples")] == ["kept", state]
    assert "broken" not in [answer.state for answer in report.laws if answer.law == "parameters"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_module_that_differs_outside_attention_is_named(kind: str, tmp_path: Path) -> None:
    path = _file(Stack(act=nn.ReLU()), tmp_path, kind)
    report = sqrtdk.diff(Stack().eval(), path, (X,))
    assert report.first_module is not None
    assert (report.first_module.a, report.same) == ("layers.0.act", False)
    assert sqrtdk.diff(Stack(act=nn.ReLU()).eval(), path, (X,)).same


@pytest.mark.parametrize(("counts", "verdict"), [("x", "exact"), ("q", "unmeasured")])
def test_an_operation_of_a_program_without_values_is_listed(counts: str, verdict: str, tmp_path: Path) -> None:
    """How many elements are over 0, their values decide: a sum of these is opaque, as its shape is known."""
    path = _file(Stack(counts=counts), tmp_path, ".pt2")
    report = sqrtdk.check(str(path), fail_on="unmeasured")
    (note,) = [note for note in report.environment["notes"] if "nonzero" in note]
    assert "layers.0" in note
    assert [judged.call.site for judged in report.calls] == ["layers.0.attn", "layers.1.attn"]
    assert [judged.verdict for judged in report.calls] == [verdict, verdict]
    assert report.exit_code == (verdict == "unmeasured")

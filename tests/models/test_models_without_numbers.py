"""Tensors on meta where nobody asked for formulas alone: those of a factory, of an input, and of torch's default."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sqrtdk
from sqrtdk.errors import InvalidValueError
from sqrtdk.models.inputs import move_inputs
from sqrtdk.models.load import resolve_model
from tests.support.lab_here import needs_lab


class Block(nn.Module):
    def __init__(self, unscaled: bool = False) -> None:
        super().__init__()
        self.unscaled = unscaled
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0 if self.unscaled else None)


def of_meta(unscaled: bool) -> nn.Module:
    with torch.device("meta"):
        return Block(unscaled)


ROWS = (2, 5, 16)
FACTORIES: dict[str, Callable[[bool], Any]] = {
    "inputs": lambda s: (Block(s), (torch.empty(ROWS, device="meta"),)),
    "inputs by name": lambda s: (Block(s), {"x": torch.empty(ROWS, device="meta")}),
    "one of the inputs": lambda s: (Block(s), {"x": torch.randn(ROWS), "mask": torch.empty(5, 5, device="meta")}),
    "weights": lambda s: (of_meta(s), (torch.randn(ROWS),)),
    "weights and inputs": lambda s: (of_meta(s), (torch.empty(ROWS, device="meta"),)),
}


@pytest.mark.parametrize("where", FACTORIES)
@pytest.mark.parametrize(("unscaled", "verdict"), [(False, "exact"), (True, "unexplained")])
def test_a_factory_without_numbers_is_judged_by_its_formulas(
    where: str, unscaled: bool, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = ModuleType("without_numbers")
    module.make = lambda: FACTORIES[where](unscaled)
    monkeypatch.setitem(sys.modules, "without_numbers", module)
    report = sqrtdk.check("without_numbers:make")
    assert (report.mode, [judged.verdict for judged in report.calls]) == ("static", [verdict])
    loaded = resolve_model("without_numbers:make", inputs=(torch.randn(ROWS),))
    assert all(p.is_meta == where.startswith("weights") for p in loaded.module.parameters())


def test_an_input_without_numbers_for_weights_with_some_is_refused() -> None:
    with pytest.raises(InvalidValueError, match=r"weights on cpu have numbers; got one of shape \(2, 5, 16\) on meta"):
        move_inputs({"x": torch.empty(ROWS, device="meta")}, Block())


@pytest.fixture
def meta_by_default() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.fixture
def block() -> tuple[nn.Module, Tensor]:
    """Made before the default is another."""
    return Block(), torch.randn(ROWS)


def verdicts(*args: Any, **kwargs: Any) -> list[str]:
    return [judged.verdict for judged in sqrtdk.check(*args, **kwargs).calls]


def test_a_check_of_real_weights_does_not_know_torch_s_default_device(
    block: tuple[nn.Module, Tensor], meta_by_default: None, tmp_path: Path
) -> None:
    model, x = block
    assert verdicts(model, inputs=(x,)) == ["exact"]
    assert sqrtdk.diff(model, model, inputs=(x,)).same
    assert sqrtdk.record(model, (x,), tmp_path / "run.safetensors").calls == 1
    assert torch.get_default_device().type == "meta"


@pytest.mark.parametrize("name", ["demo", "demo:unscaled"])
def test_a_model_by_name_has_its_weights_whatever_the_default_device(name: str, meta_by_default: None) -> None:
    report = sqrtdk.check(name, seq_len=16)
    assert report.mode == "dynamic"
    assert {judged.verdict for judged in report.calls} == {"exact" if name == "demo" else "unexplained"}
    assert sqrtdk.kv.kv_forecast(name, kv_dtype="int8", seq_len=16).calls


@needs_lab
def test_a_claim_is_measured_whatever_the_default_device(meta_by_default: None) -> None:
    import sqrtdk_lab

    assert sqrtdk_lab.run("onehot-64", quick=True).record.outcome.verdict.answer == "holds"


def test_a_checkpoint_is_built_with_its_weights_whatever_the_default_device(
    meta_by_default: None, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=99, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    with torch.device("cpu"):
        transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    for name in (tmp_path, tmp_path / "config.json"):
        report = sqrtdk.check(str(name), seq_len=8)
        assert (report.mode, [judged.verdict for judged in report.calls]) == ("dynamic", ["exact"])


def test_the_op_makes_what_it_needs_beside_its_inputs(block: tuple[nn.Module, Tensor], meta_by_default: None) -> None:
    q = block[1].unflatten(-1, (2, 8)).transpose(1, 2)
    for given in ({"softcap": 3.0}, {"window": (2, 0)}, {"sinks": 0.0}, {"return_aux": sqrtdk.AuxRequest.all()}):
        found = sqrtdk.attention(q, q, q, **given)
        for part in (found,) if isinstance(found, Tensor) else (found[0], *found[1]):
            assert part.isfinite().all()  # and not on meta, where nothing can be told

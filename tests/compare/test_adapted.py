"""`diff` with an adapter: which modules carry it, and every way in which a merge goes wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sqrtdk import diff
from sqrtdk.compare.records import DiffReport
from sqrtdk.compare.weights.records import KnownChanges
from sqrtdk.models.adapters import ADAPTER_CONFIG
from tests.models.adapted import adapter, base_model, written_base

SCALE, RANK = 2.0, 4  # of `adapter`


@pytest.fixture
def home(tmp_path: Path) -> Path:
    written_base(tmp_path / "base")
    adapter(tmp_path / "lora")
    return tmp_path


def compared(a: Any, b: Any) -> DiffReport:
    sides = (side if isinstance(side, nn.Module) else str(side) for side in (a, b))
    return diff(*sides, seq_len=8)


def known(report: DiffReport) -> KnownChanges:
    assert report.weights is not None
    assert report.weights.known is not None
    return report.weights.known


def said(report: DiffReport) -> str:
    return " ".join(map(str, report.paragraphs))


def merged(home: Path, put: Callable[[dict[str, Tensor], str, Tensor], None], **fields: Any) -> nn.Module:
    """The base, with each update of the adapter put into it as a function says; it is given B A times the scale."""
    tensors = adapter(home / "lora", **fields)
    model = base_model()
    weights = dict(model.named_parameters())
    for key, up in tensors.items():
        if ".lora_B." in key:
            name = key.removeprefix("base_model.model.").replace(".lora_B.", ".")
            put(weights, name, SCALE * up @ tensors[key.replace("lora_B", "lora_A")])
    return model


def add(times: float) -> Callable[[dict[str, Tensor], str, Tensor], None]:
    def put(weights: dict[str, Tensor], name: str, update: Tensor) -> None:
        weights[name].data += times * update

    return put


@pytest.mark.parametrize("as_merged", [False, True])
def test_a_right_adapter_is_named_with_what_carries_it_and_nothing_else(home: Path, as_merged: bool) -> None:
    sides = (home / "lora", merged(home, add(1))) if as_merged else (home / "base", home / "lora")
    report = compared(*sides)
    found = known(report)
    (change,) = found.changes
    assert (report.same, report.exit_code) == (True, 0)
    assert not found.faults
    assert (change.kind, change.rank, change.scale, len(change.weights)) == ("LoRA", (RANK,), (SCALE,), 4)
    assert "LoRA of rank 4, scale 2, in `q_proj` and `v_proj` of 2 layers" in said(report)
    assert [role for role, _ in change.costs] == [
        "model.layers.#.self_attn.v_proj.weight", "model.layers.#.self_attn.q_proj.weight"
    ]  # fmt: skip
    assert "The first difference" not in said(report)


def test_the_other_side_is_the_base_of_an_adapter_that_finds_none(home: Path) -> None:
    config = json.loads((home / "lora" / ADAPTER_CONFIG).read_text())
    (home / "lora" / ADAPTER_CONFIG).write_text(json.dumps(config | {"base_model_name_or_path": "org/nowhere"}))
    assert compared(home / "base", home / "lora").same


@pytest.mark.parametrize(
    ("times", "fields", "code", "words"),
    [
        (0.0, {}, "none", "B lacks the adapter in"),
        (2.0, {}, "twice", "B holds 2 times the adapter's update"),
        (1 / SCALE, {}, "unscaled", "its scale was left out"),
        (math.sqrt(RANK), {}, "root", "alpha / sqrt(r) was taken for alpha / r"),
        (1 / math.sqrt(RANK), {"use_rslora": True, "lora_alpha": 4}, "no_root", "alpha / r was taken for"),
        (-1.0, {}, "reversed", "it was subtracted"),
        (3.7, {}, None, "B holds 3.7 times the adapter's update"),
    ],
)
def test_a_share_of_the_update_is_named(home: Path, times: float, fields: Any, code: str | None, words: str) -> None:
    report = compared(home / "lora", merged(home, add(times), **fields))
    (fault,) = known(report).faults
    assert not report.same
    assert report.exit_code == 1
    assert (code in fault.codes) if code else not fault.codes
    assert len(fault.weights) == 4
    assert words in said(report)
    assert fault.factor == pytest.approx(times, abs=1e-5)
    assert "The first difference" not in said(report)


def test_a_scale_that_was_applied_twice_is_told_from_a_second_merge(home: Path) -> None:
    report = compared(home / "lora", merged(home, add(SCALE**2), lora_alpha=16))  # the scale is 4, B A has 2 * 4
    (fault,) = known(report).faults
    assert fault.codes == ("twice", "root")  # the root of rank 4 is 2 as well
    model = merged(home, add(2 * 4), lora_alpha=16)
    (fault,) = known(compared(home / "lora", model)).faults
    assert (fault.codes, round(fault.factor or 0, 3)) == (("scale",), 4.0)


def test_updates_in_the_wrong_layer_and_transposed_are_named(home: Path) -> None:
    def next_layer(weights: dict[str, Tensor], name: str, update: Tensor) -> None:
        other = name.replace("layers.0", "layers.x").replace("layers.1", "layers.0").replace("layers.x", "layers.1")
        weights[other].data += update

    (fault,) = known(report := compared(home / "lora", merged(home, next_layer))).faults
    assert fault.name == "adapter_elsewhere"
    assert "`model.layers.0.self_attn.q_proj` has that of `model.layers.1.self_attn.q_proj`" in said(report)

    def turned(weights: dict[str, Tensor], name: str, update: Tensor) -> None:
        weights[name].data += update.mT if "q_proj" in name else update

    report = compared(home / "lora", merged(home, turned))
    (fault,) = known(report).faults
    assert fault.name == "adapter_transposed"
    assert all("q_proj" in name for name in fault.weights)
    assert "in `v_proj` of 2 layers" in said(report)


def test_digits_that_a_merge_lost_are_named(home: Path) -> None:
    def rounded(weights: dict[str, Tensor], name: str, update: Tensor) -> None:
        weights[name].data = (weights[name].data + update).bfloat16().float()

    report = compared(home / "lora", merged(home, rounded))
    (fault,) = known(report).faults
    assert (fault.name, fault.dtype) == ("adapter_dtype", "bfloat16")
    assert not report.same


def test_an_adapter_of_zeros_and_one_that_no_file_tells_of(home: Path) -> None:
    from safetensors.torch import save_file

    model = merged(home, add(1))
    report = compared(home / "base", model)
    (fault,) = known(report).faults
    assert (fault.name, known(report).changes[0].rank) == ("adapter_untold", (RANK,))
    assert not report.same
    zeros = {key: x * ("lora_A" in key) for key, x in adapter(home / "lora").items()}
    save_file(zeros, home / "lora" / "adapter_model.safetensors")
    report = compared(home / "base", home / "lora")
    assert [fault.name for fault in known(report).faults] == ["adapter_zero"]


def test_another_difference_beside_a_right_adapter_is_still_found(home: Path) -> None:
    model: Any = merged(home, add(1))
    model.model.layers[1].self_attn.scaling *= 2
    model.model.norm.weight.data *= 1.5
    report = compared(home / "lora", model)
    assert not known(report).faults
    assert not report.same
    assert any(cause.name == "scale" for pair in report.pairs for cause in pair.causes)
    assert any(cause.name == "weights_scaled" for cause in report.module_causes)


def test_another_base_is_a_difference_and_no_adapter(home: Path) -> None:
    model: Any = base_model()
    torch.nn.init.normal_(model.model.layers[0].self_attn.q_proj.weight)
    report = compared(home / "lora", model)
    assert not report.same
    assert "model.layers.0.self_attn.q_proj.weight" not in {n for f in known(report).faults for n in f.weights}

"""Checkpoints that quantisation libraries wrote themselves: read as what their own layers compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sqrtdk import diff
from sqrtdk.models.load import resolve_model
from sqrtdk.models.options import LoadOptions
from tests.models.adapted import base_model, written_base
from tests.support.optional import optional

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]  # of the libraries
SHORT = LoadOptions(seq_len=8)
PLACE = "model.layers.1.mlp.up_proj.weight"


def of_hqq(path: Path, bits: int, axis: int) -> dict[str, Tensor]:
    """Write the base as transformers 4 does: the state of HQQ's layers beside the plain ones."""
    hqq = optional("hqq.core.quantize")
    written_base(path)
    file, settings = path / "model.safetensors", hqq.BaseQuantizeConfig(nbits=bits, group_size=16, axis=axis)
    state, expected = load_file(file), {}
    for name in [name for name in state if "_proj" in name]:
        linear = torch.nn.Linear(*state[name].shape[::-1], bias=False)
        linear.weight.data = state.pop(name)
        layer = hqq.HQQLinear(linear, settings, compute_dtype=torch.float32, device="cpu")
        expected[name] = layer.dequantize()
        state |= {name.removesuffix("weight") + part: x.contiguous() for part, x in layer.state_dict().items()}
    save_file(state, file, {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "hqq"}}))
    return expected


def of_quanto(path: Path) -> dict[str, Tensor]:
    quanto = optional("optimum.quanto")
    made = quanto.QuantizedModelForCausalLM.quantize(base_model(), weights=quanto.qint8, exclude="lm_head")
    made.save_pretrained(path)
    inner: Any = made._wrapped
    return {name: p.dequantize() for name, p in inner.named_parameters() if "_proj" in name}


def of_torchao(path: Path) -> dict[str, Tensor]:
    torchao = optional("torchao.quantization")
    from transformers import AutoModelForCausalLM, TorchAoConfig

    written_base(path / "plain")
    settings = TorchAoConfig(torchao.Int8WeightOnlyConfig())
    made = AutoModelForCausalLM.from_pretrained(path / "plain", quantization_config=settings, dtype=torch.float32)
    made.save_pretrained(path)
    return {name: p.dequantize() for name, p in made.named_parameters() if "_proj" in name}


@pytest.mark.parametrize(
    ("write", "kind"),
    [
        (lambda path: of_hqq(path, 4, 1), "int4, groups of 16, offsets"),
        (lambda path: of_hqq(path, 3, 1), "int3, groups of 16, offsets"),
        (lambda path: of_hqq(path, 2, 1), "int2, groups of 16, offsets"),
        (of_quanto, "int8, a scale a row"),
        (of_torchao, "int8, a scale a row"),
    ],
    ids=["hqq 4", "hqq 3", "hqq 2", "quanto", "torchao"],
)
def test_a_checkpoint_of_a_library_is_read_and_its_rounding_is_named(tmp_path: Path, write: Any, kind: str) -> None:
    expected = write(tmp_path / "quantised")
    module = resolve_model(str(tmp_path / "quantised"), SHORT).module
    for name, weight in expected.items():
        torch.testing.assert_close(module.get_parameter(name).detach(), weight.detach(), rtol=2e-6, atol=1e-8)
    written_base(tmp_path / "base")
    report = diff(str(tmp_path / "base"), str(tmp_path / "quantised"), seq_len=8)
    assert report.same
    assert report.weights is not None
    assert report.weights.known is not None
    assert {change.kind for change in report.weights.known.changes} == {kind}
    assert sum(len(change.weights) for change in report.weights.known.changes) == len(expected) == 14

"""Layers of quantisation libraries, written as plain ones by what they compute."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sqrtdk.models.plain import plain_twin
from tests.models.adapted import base_model
from tests.support.optional import optional

torchao = optional("torchao.quantization")
quanto = optional("optimum.quanto")


def of_torchao(model: Any) -> Any:
    torchao.quantize_(model.model, torchao.Int8WeightOnlyConfig())
    return model


def of_quanto(model: Any) -> Any:
    quanto.quantize(model.model, weights=quanto.qint8)
    quanto.freeze(model.model)
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("quantise", [of_torchao, of_quanto])
def test_a_twin_gives_what_the_library_gives_and_its_model_stays(quantise: Callable[[Any], Any]) -> None:
    base = base_model()
    model = quantise(copy.deepcopy(base)).eval()
    ids = torch.arange(8)[None]
    before = model(input_ids=ids).logits
    twin = plain_twin(model)
    assert (twin.layers, twin.left) == (14, ())
    with torch.no_grad():
        off = (twin.module(input_ids=ids).logits - before).norm()
        moved = (base(input_ids=ids).logits - before).norm()
    assert float(off) < 0.05 * float(moved)  # what is left of the library is far less than its rounding
    assert torch.equal(model(input_ids=ids).logits, before)


def test_a_model_of_plain_layers_is_its_own_twin() -> None:
    model = base_model()
    assert plain_twin(model).module is model

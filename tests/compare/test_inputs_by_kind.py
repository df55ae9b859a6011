"""Inputs of one side are handed to the other by name, or else by what they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sqrtdk.compare.inputs import fit_inputs, named_inputs

IDS = torch.randint(0, 9, (2, 5))
OF_TRANSFORMERS = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}


def _takes(source: str) -> nn.Module:
    """Return a module whose forward has these arguments."""
    names: dict[str, Any] = {}
    exec(f"def forward(self, {source}): pass", names)
    return type("Port", (nn.Module,), {"forward": names["forward"]})()


def test_ids_of_another_name_are_found() -> None:
    for name in ("tokens", "ids", "idx", "input_tokens"):
        fitted = fit_inputs(_takes(name), OF_TRANSFORMERS)
        assert list(fitted.inputs) == [name]
        assert fitted.inputs[name] is IDS
        assert [str(note) for note in fitted.notes] == ["it takes no attention_mask, which hides nothing here"]


def test_what_a_side_lacks_is_said() -> None:
    mask = torch.ones_like(IDS)
    mask[0, :2] = 0
    fitted = fit_inputs(_takes("tokens"), {"input_ids": IDS, "attention_mask": mask})
    assert [str(note) for note in fitted.notes] == ["it takes no attention_mask: the other side computes with it"]


@pytest.mark.parametrize("order", ["tokens, positions, mask", "mask, positions, tokens"])
def test_positions_and_masks_are_made(order: str) -> None:
    fitted = fit_inputs(_takes(order), {"input_ids": IDS})
    assert torch.equal(fitted.inputs["tokens"], IDS)
    assert torch.equal(fitted.inputs["positions"], torch.arange(5).expand(2, 5))
    assert bool((fitted.inputs["mask"] == 1).all())
    assert len(fitted.notes) == 2


def test_a_mask_serves_as_segments() -> None:
    mask = torch.ones_like(IDS)
    mask[1, 3:] = 0
    fitted = fit_inputs(_takes("tokens, segment_ids"), {"input_ids": IDS, "attention_mask": mask})
    assert torch.equal(fitted.inputs["segment_ids"], mask)


def test_names_that_say_nothing_are_filled_in_order() -> None:
    assert fit_inputs(_takes("x"), OF_TRANSFORMERS).inputs == (IDS,)


def test_inputs_by_position_get_the_names_of_their_module() -> None:
    positions = torch.arange(5).expand(2, 5)
    assert named_inputs(_takes("tokens, positions"), (IDS, positions)) == {"tokens": IDS, "positions": positions}
    assert named_inputs(_takes("x, y"), (IDS, positions)) == (IDS, positions)
    assert named_inputs(_takes("tokens"), (IDS,)) == (IDS,)

"""`diff` of one checkpoint in two dtypes: weights that went through half precision, in runs in float32."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from sqrtdk.compare.diff import diff
from tests.compare.test_beside import IDS, WIDTH, Decoder, WithTorchs


def rounded(model: nn.Module, dtype: torch.dtype, only: str = "") -> nn.Module:
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if only in name:
                parameter.copy_(parameter.to(dtype))
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_checkpoint_that_went_through_half_precision_is_named(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    report = diff(Decoder(), rounded(Decoder(), dtype), IDS)
    said = " ".join(map(str, report.paragraphs))
    assert f"holds A's weights of q, k and v rounded to {name}" in said
    assert f"The first difference is in `embed`: B's `weight` is A's rounded to {name}." in said
    assert [{cause.name for cause in pair.causes} for pair in report.pairs] == [{"input", "weights"}, {"weights"}]
    assert "unknown" not in said


def test_the_other_way_round_and_in_a_fused_weight() -> None:
    a = rounded(WithTorchs(), torch.bfloat16, "in_proj_weight")
    said = str(diff(a, WithTorchs(), IDS).paragraphs[0])
    assert said.startswith("B does not hold the weights of q, k and v rounded to bfloat16, as A does")


def test_what_else_is_done_to_rounded_weights_is_no_rounding() -> None:
    b = rounded(Decoder(), torch.bfloat16)
    with torch.no_grad():
        b.get_parameter("layers.0.q_proj.weight")[0, 0] += 1 / WIDTH
    said = " ".join(map(str, diff(Decoder(), b, IDS).paragraphs))
    assert "another weight for q, layers.0.q_proj.weight: " in said
    assert "weights of k and v rounded to bfloat16" in said


def test_half_precision_of_a_run_is_no_cause() -> None:
    report = diff(Decoder(), Decoder().bfloat16(), IDS)
    assert not any(cause.name == "weights" for pair in report.pairs for cause in pair.causes)

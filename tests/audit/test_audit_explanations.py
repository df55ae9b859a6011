"""Each row of the table of explanations: a call that it alone explains first, with its verdict."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sqrtdk.audit import explanations
from sqrtdk.audit.explanations import EXPLANATIONS, judge_scale
from sqrtdk.tracing.records import BY_BLOCK, FROM_DATA, Factor, Stage
from tests.audit.stranger_modules import module

GAIN = Factor(3.0, "logits", "parameter gain", learned=True)
COSINE = {"norm": "l2", "stages": (Stage("norm", "q"), Stage("norm", "k"))}


class Proportional(nn.Module):
    """diffusers' way: the base of the logarithm is an argument of the attention."""

    def forward(self, x, base_sequence_length):
        return x


# What the call is, besides: its effective scale and its factors; what is declared; the verdict and the mistake.
ROWS = {
    "unlike_blocks": (None, {"factors": (Factor(None, "logits", BY_BLOCK),)}, {}, ("unexplained", None)),
    "no_dimensions": (0.25, {"head_dim": 0}, {}, ("unmeasured", None)),
    "factor_of_the_data": (0.5, {"factors": (Factor(2.0, "logits", FROM_DATA), Factor(0.25, "op", "number"))}, {},
                           ("declared", None)),
    "learned_gain_without_a_value": (None, {"factors": (replace(GAIN, value=None),)}, {}, ("declared", None)),
    "not_read": (None, {}, {}, ("unmeasured", None)),
    "as_declared": (0.3, {}, {"config": {"softmax_scale": 0.3}}, ("declared", None)),
    "against_the_declaration": (0.25, {}, {"config": {"softmax_scale": 0.3}}, ("unexplained", "unknown")),
    "divided_cosine": (0.25, COSINE, {}, ("unexplained", "cosine")),
    "textbook": (0.25, {}, {}, ("exact", None)),
    "mistake_beside_a_gain": (3 / 16, {"factors": (GAIN, 0.25, 0.25)}, {}, ("unexplained", "twice")),
    "learned_gain": (3.0, {"factors": (GAIN,)}, {}, ("declared", None)),
    "learned_family": (3.0, {}, {"config": SimpleNamespace(model_type="swinv2")}, ("declared", None)),
    "normalised_q_and_k": (4.0, COSINE, {}, ("declared", None)),
    "proportional": (math.sqrt(math.log(24) / math.log(100) / 16), {}, {"module": Proportional()}, ("declared", None)),
    "channels": (1.0, {"axis": "channels"}, {}, ("declared", None)),
    "recurrent_states": (1.0, {"heads": 1, "stages": (Stage("k", "projection", "gru"),)}, {}, ("declared", None)),
    "learned_attribute": (0.3, {}, {"module": module(scaling=nn.Parameter(torch.tensor(0.3)))}, ("declared", None)),
    "cosine_with_a_gain": (7.0, COSINE, {}, ("declared", None)),
    "channels_without_a_rule": (0.3, {"axis": "channels"}, {}, ("unmeasured", None)),
    "not_positive": (-0.25, {}, {}, ("unexplained", "unknown")),
    "mistake": (1.0, {}, {}, ("unexplained", "missing")),
}  # fmt: skip


def test_every_row_has_a_call():
    assert list(ROWS) == list(EXPLANATIONS)


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_the_first_to_explain_its_call(monkeypatch, make_call, name):
    applied = []

    def recorded(row, explain):
        def of(evidence):
            judged = explain(evidence)
            if judged is not None:
                applied.append(row)
            return judged

        return of

    table = {row: recorded(row, explain) for row, explain in EXPLANATIONS.items()}
    monkeypatch.setattr(explanations, "EXPLANATIONS", table)
    effective, changes, declared, expected = ROWS[name]
    judged = judge_scale(make_call(effective, **changes), **declared)
    assert applied[-1] == name  # what stands beside a factor of the data is explained before it
    assert (judged.verdict, judged.mistake) == expected

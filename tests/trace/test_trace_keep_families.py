"""Every family with each attention that it has, in each dtype: what is kept gives what the model gave."""

from __future__ import annotations

import pytest
import torch

import sqrtdk

pytest.importorskip("transformers")
from sqrtdk.models.inputs import make_inputs
from tests.hf.families import CASES, FAMILIES, build
from tests.trace.kept import check, known

# Projections that are not known: matrices a head, learned queries, keys from two projections.
IN_PARTS = ("xlnet", "detr", "deepseek_v2", "deepseek_v3")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "attn"), CASES)
def test_every_family(name: str, attn: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = build(FAMILIES[name](), attn).eval().to(dtype)
    inputs, _ = make_inputs(model, model.config, batch=2, seq_len=24)
    inputs = {key: x.to(dtype) if x.is_floating_point() else x for key, x in inputs.items()}
    with torch.no_grad(), sqrtdk.trace(model, keep=True) as run:
        model(**inputs)
    check(run)
    if name not in IN_PARTS:
        assert all(set(known(call).values()) == {"projection"} for call in run.tensors)


@pytest.mark.parametrize(("name", "attn"), [("llama", "eager"), ("gpt2", "sdpa"), ("deepseek_v3", "eager")])
def test_padded(name: str, attn: str) -> None:
    torch.manual_seed(0)
    model = build(FAMILIES[name](), attn).eval()
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :4] = 0
    with torch.no_grad(), sqrtdk.trace(model, keep=True) as run:
        model(input_ids=torch.randint(3, 100, (2, 12)), attention_mask=mask)
    check(run)

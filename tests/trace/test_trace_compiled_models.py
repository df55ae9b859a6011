"""Modules and models that attend by the project's compiled kernel are audited as they are without it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import sqrtdk
from sqrtdk.integrations.transformers import register
from tests.attentions.compiled import (
    ALIBI,
    PADDED,
    PLAIN,
    WIDTH,
    B,
    E,
    H,
    L,
    checked,
    kernel,
    load_kernel,
    only,
    told,
    traced,
)
from tests.hf.families import FAMILIES, GROUPED
from tests.support.kernel_here import needs_kernel
from tests.support.needs import needs
from tests.tolerances import allowed

pytestmark = needs_kernel


@pytest.fixture(autouse=True, scope="module")
def _loaded() -> None:
    load_kernel()


@pytest.mark.parametrize(
    ("options", "call", "formula"),
    [
        ({}, {}, PLAIN),
        ({}, {"is_causal": True}, f"{PLAIN} + causal"),
        ({"kv_heads": 2, "position": sqrtdk.positions.rope}, {"is_causal": True}, "0.25 * rope(q).rope(k) + causal"),
        ({"qk_norm": "rms", "scale": 1.0}, {}, "rms(q).rms(k)"),
        ({"scale": nn.Parameter(torch.full((H, 1, 1), 0.2))}, {}, "scale[h] * q.k"),
        ({"softcap": 5.0, "window": (3, 0)}, {}, f"5 * tanh({PLAIN} / 5) + window"),
        ({"sinks": nn.Parameter(torch.zeros(H))}, {"is_causal": True}, f"{PLAIN} + causal + sinks"),
        ({"position": ALIBI}, {"key_padding_mask": ~PADDED.view(B, L)}, f"{PLAIN} + alibi + padding"),
    ],
    ids=["plain", "causal", "grouped rope", "normed", "scale", "softcap window", "sinks", "alibi padding"],
)
def test_our_module(options: dict[str, Any], call: dict[str, Any], formula: str) -> None:
    x = torch.randn(B, L, H * E)
    records = {}
    for impl in ("dense", "cpu"):
        torch.manual_seed(0)
        module = sqrtdk.nn.MultiHeadAttention(H * E, H, batch_first=True, impl=impl, **copy.deepcopy(options))
        with sqrtdk.trace(module) as run:
            module(x, x, x, need_weights=False, **call)
        records[impl] = only(run, "compiled" if impl == "cpu" else "eager")
    assert records["cpu"].formula == records["dense"].formula == f"softmax({formula})"
    assert records["cpu"].scale.agree is records["dense"].scale.agree is True
    assert records["cpu"].kv_heads == records["dense"].kv_heads == options.get("kv_heads", H)


class Folded(nn.Module):
    """Batch and heads in one dimension, or a single head without one."""

    def __init__(self, impl: str, heads: int) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, heads * E) for _ in range(3))
        self.impl, self.split = impl, heads

    def forward(self, x: Tensor) -> Tensor:
        parts = (f(x).unflatten(-1, (self.split, E)).transpose(1, 2).flatten(0, 1) for f in self.qkv)
        output = sqrtdk.attention(*parts, is_causal=True, impl=self.impl)
        assert isinstance(output, Tensor)
        return output


@pytest.mark.parametrize("heads", [1, 4])
def test_batch_and_heads_in_one_dimension(heads: int) -> None:
    x = torch.randn(3, L, WIDTH)
    records = []
    for impl, kind in (("fused", "sdpa"), ("cpu", "compiled")):
        torch.manual_seed(0)
        records.append(only(traced(Folded(impl, heads), x), kind))
    for record in records:
        assert (record.batch, record.heads, record.kv_heads) == (3, heads, heads)
        assert (record.formula, record.scale.agree) == (f"softmax({PLAIN} + causal)", True)
    stats = records[1].stats
    assert stats is not None
    assert (stats.heads, stats.rows) == (heads, 3 * L)


def gpt_oss() -> hf.PretrainedConfig:
    sizes = GROUPED | {"head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 4}
    return hf.GptOssConfig(**sizes)


MODELS: dict[str, tuple[Callable[[], hf.PretrainedConfig], list[str]]] = {
    "llama": (FAMILIES["llama"], ["softmax(0.25 * rope(q).rope(k) + causal)"] * 2),
    "gemma2": (  # query_pre_attn_scalar = 20
        FAMILIES["gemma2"],
        [f"softmax(50 * tanh({20**-0.5:.4g} * rope(q).rope(k) / 50) + {mask})" for mask in ("window", "causal")],
    ),
    "gpt_oss": (  # YaRN by a factor of 32, in both tables
        gpt_oss,
        [
            f"softmax({0.25 * (0.1 * math.log(32) + 1) ** 2:.4g} * rope(q).rope(k) + {mask} + sinks)"
            for mask in ("window", "causal")
        ],
    ),
}


def ids(length: int = 9) -> Tensor:
    return torch.randint(3, 160, (2, length), generator=torch.Generator().manual_seed(1))


def transformer(config: hf.PretrainedConfig) -> nn.Module:
    register()
    torch.manual_seed(0)
    return hf.AutoModel.from_config(copy.deepcopy(config), attn_implementation="sqrtdk").eval()


@pytest.mark.sampled(1)
@needs("GptOss", transformers="4.55")
@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(name: str) -> None:
    """Read and judged as without the kernel, and compared with eager without a difference."""
    config, formulas = MODELS[name]
    reports = {}
    for taken in (False, True):
        with kernel(taken):
            reports[taken] = checked(transformer(config()), {"input_ids": ids()}, attn=None)
    assert told(reports[True]) == told(reports[False])
    assert {judged.verdict for judged in reports[True].calls} <= {"exact", "declared"}
    assert "eager_vs_sdpa" not in {finding.rule for finding in reports[True].findings}
    twins, calls = ([judged.call for judged in reports[taken].calls] for taken in (False, True))
    assert {call.kind for call in calls} == {"compiled"}
    assert "compiled" not in {call.kind for call in twins}
    assert [call.formula for call in calls] == formulas
    for call, twin in zip(calls, twins, strict=True):
        single = allowed(torch.float32, length=4, logit=0.0, magnitude=1.0)  # factors
        assert call.scale.symbolic == pytest.approx(twin.scale.symbolic, rel=single)
        assert call.scale.agree is twin.scale.agree is True
        assert (call.site, call.heads, call.kv_heads) == (twin.site, twin.heads, twin.kv_heads)
        assert call.stats is not None
        assert twin.stats is not None
        room = allowed(torch.float32, length=E, logit=max(twin.stats.max_abs_logit), magnitude=1.0)
        assert call.stats.entropy_nats == pytest.approx(twin.stats.entropy_nats, abs=9 * room)
        assert call.stats.max_logit == pytest.approx(twin.stats.max_logit, abs=room)


@pytest.mark.sampled(2)
@needs("attention functions of others", transformers="4.53")
@pytest.mark.parametrize("name", ["gpt2", "qwen3", "deepseek_v3", "t5", "whisper", "bert"])
def test_audit_is_that_without_the_kernel(name: str) -> None:
    """Norms, latent keys, relative positions, cross attention and encoders, on inputs of the right kind."""
    reports = {}
    for taken in (False, True):
        with kernel(taken):
            reports[taken] = sqrtdk.check(transformer(FAMILIES[name]()))
    assert told(reports[True]) == told(reports[False])
    assert {judged.call.kind for judged in reports[True].calls} == {"compiled"}

"""`sqrtdk.attention` in the place of torch's function, by assignment: whoever calls that gets ours, and ours ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

import sqrtdk
from tests.attention.calls import close, every, qkv
from tests.attention.oracle import attend

TORCH_S = functional.scaled_dot_product_attention


@pytest.fixture
def in_place() -> Iterator[list[str]]:
    """The names of the implementations that ran."""
    ran: list[str] = []

    def ours(*args: object, **kwargs: object) -> Tensor:
        ran.append(str(kwargs.get("impl", "auto")))
        return sqrtdk.attention(*args, **kwargs)  # type: ignore[call-overload,no-any-return]

    functional.scaled_dot_product_attention = ours
    try:
        yield ran
    finally:
        functional.scaled_dot_product_attention = TORCH_S


@every
def test_a_call_by_torch_s_name_is_ours(impl: str, in_place: list[str]) -> None:
    q, k, v = qkv()
    for given in ({}, {"is_causal": True}, {"attn_mask": torch.rand(7, 9) > 0.3}, {"softcap": 3.0}):
        if impl == "fused" and "softcap" in given:
            continue
        found = functional.scaled_dot_product_attention(q, k, v, impl=impl, **given)  # type: ignore[call-arg]
        answer = attend(q, k, v, scale=8**-0.5, **given)  # type: ignore[arg-type]
        close(found, answer.output, logit=answer.size)
    seen = torch.ones(7, 9).tril(2).bool()
    biased = functional.scaled_dot_product_attention(q, k, v, causal_lower_right(7, 9), impl=impl)  # type: ignore[call-arg]
    close(biased, attend(q, k, v, scale=8**-0.5, attn_mask=seen).output)
    assert len(in_place) >= 4


class Block(nn.Module):
    """A model that calls torch's function by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("kind", ["block", "nn.MultiheadAttention", "nn.TransformerEncoderLayer"])
def test_a_model_runs_and_learns_as_it_did(kind: str, in_place: list[str]) -> None:
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    x = torch.randn(2, 5, 16)
    if kind == "block":
        model: nn.Module = Block()
        run = lambda: model(x)  # noqa: E731
    elif kind == "nn.MultiheadAttention":
        model = nn.MultiheadAttention(16, 2, batch_first=True)
        run = lambda: model(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]  # noqa: E731
    else:
        model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        run = lambda: model(x, src_mask=mask, is_causal=True)  # noqa: E731
    output = run()
    ours = torch.autograd.grad(output.square().sum(), list(model.parameters()))
    assert in_place == ["auto"]
    functional.scaled_dot_product_attention = TORCH_S
    wanted = run()
    close(output, wanted.double())
    torchs = torch.autograd.grad(wanted.square().sum(), list(model.parameters()))
    torch.testing.assert_close(ours, torchs)
    functional.scaled_dot_product_attention = sqrtdk.attention
    report = sqrtdk.check(model, inputs=(x, x, x) if kind == "nn.MultiheadAttention" else (x,))
    assert [judged.verdict for judged in report.calls] == ["exact"]


def test_a_model_of_transformers_that_asks_for_sdpa_gets_ours(in_place: list[str]) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, intermediate_size=32, vocab_size=99, attn_implementation="sdpa")
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.arange(1, 17).view(2, 8)
    with torch.no_grad():
        found = model(ids).logits
    assert in_place == ["auto"] * 2
    functional.scaled_dot_product_attention = TORCH_S
    with torch.no_grad():
        close(found, model(ids).logits.double())

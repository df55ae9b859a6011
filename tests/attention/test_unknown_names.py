"""Arguments, attributes and options under names of other libraries: the error says what stands in their place."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import sqrtdk
from sqrtdk import AuxRequest, positions, scales, scores

Q = K = V = torch.zeros(1, 2, 4, 8)
X = torch.randn(4, 1, 8)
MODULE: Any = sqrtdk.nn.MultiHeadAttention(8, 2)


@pytest.mark.parametrize(
    ("call", "rule", "cure"),
    [
        (lambda: sqrtdk.attention(Q, K, V, windw=3), "did you mean 'window'?", "Its arguments: query"),
        (
            lambda: sqrtdk.attention(Q, K, V, attention_mask=None),
            "no argument 'attention_mask'",
            "Pass attn_mask, True where the key takes part",
        ),
        (lambda: sqrtdk.attention(Q, K, V, sliding_window=3), "no argument 'sliding_window'", "Pass window=n"),
        (lambda: sqrtdk.explain(Q, K, V, return_lse=True), "explain has no argument", "AuxRequest(lse=True)"),
        (lambda: sqrtdk.measure(Q, K, V), "measure takes query and key, and no value; got 3", "measure(q, k)"),
        (
            lambda: sqrtdk.measure(MODULE, {"x": X}),
            "query is a tensor; got MultiHeadAttention",
            "sqrtdk.check(model, in",
        ),
        (lambda: sqrtdk.measure(Q, K[:, :1].repeat(1, 3, 1, 1)), "query and key broadcast; got query (1, 2,", "Expand"),
        (lambda: sqrtdk.measure(Q, K.double()), "query and key have one dtype; got query torch.float32", "Cast"),
        (
            lambda: sqrtdk.measure(Q, K[:, :1].repeat(1, 3, 1, 1), enable_gqa=True),
            "the heads of key divide those of query; got heads of query 2, key 3",
            "neighbours",
        ),
        (
            lambda: sqrtdk.attention(Q, K, V[:, :1].repeat(1, 3, 1, 1)),
            "query, key and value broadcast; got query (1, 2, 4, 8), key (1, 2, 4, 8), value (1, 3, 4, 8)",
            "Expand",
        ),
        (lambda: sqrtdk.measure(Q, K, temperature=2.0), "no argument 'temperature'", "scales.temperature(t)"),
        (
            lambda: sqrtdk.attention(Q, K, V, score=lambda q: q),
            "score(q, k); got one with the parameters (q)",
            "2 parameters",
        ),
        (
            lambda: sqrtdk.attention(Q, K, V, score_mod=lambda s, b: s),
            "q_idx, kv_idx); got one with the",
            "5 parameters",
        ),
        (lambda: sqrtdk.attention(Q, K, V, scale="1/d"), "did you mean 'dk'?", "two_sqrt_dk"),
        (lambda: sqrtdk.attention(Q, K, V, scale=torch.ones(99)), "scale broadcasts to", f"({Q.shape[1]},)"),
        (lambda: AuxRequest(entropy=True), "did you mean 'entropy_nats'?", "lse, max_logit"),
        (lambda: sqrtdk.nn.CosineAttention(64, 4), "takes a rate of dropout", "MultiHeadAttention(embed_dim"),
        (lambda: sqrtdk.nn.MultiHeadAttention(8, 2, heads=2), "did you mean 'kv_heads'?", "embed_dim"),
        (lambda: MODULE(X, X, X, mask=None), "MultiHeadAttention has no argument 'mask'", "True where a key is hidden"),
        (lambda: MODULE(X, X, X, window=3), "no argument 'window'", "Its arguments: query"),
        (lambda: sqrtdk.nn.CosineAttention(2)(Q, K, V, return_weights=True), "no argument", "need_weights=True"),
        (lambda: sqrtdk.nn.RelativeAttention(8, 2)(Q, K, V, causal=True), "no argument 'causal'", "is_causal=True"),
    ],
)
def test_an_unknown_argument_is_told_with_its_cure(call: Callable[[], Any], rule: str, cure: str) -> None:
    with pytest.raises(sqrtdk.SqrtdkError) as caught:
        call()
    assert rule in str(caught.value)
    assert cure in caught.value.hint


@pytest.mark.parametrize(
    ("read", "told"),
    [
        (lambda: sqrtdk.atention, "did you mean 'attention'?"),
        (lambda: sqrtdk.MultiheadAttention, "it is sqrtdk.nn.MultiHeadAttention"),
        (lambda: sqrtdk.nn.MultiheadAttention, "it is sqrtdk.nn.MultiHeadAttention"),
        (lambda: sqrtdk.testing.assert_atention, "did you mean 'assert_attention'?"),
        (lambda: sqrtdk.lab, "it is the package sqrtdk_lab"),
        (lambda: sqrtdk.measure(Q, K).std, "it is the root of 'variance'"),
        (lambda: sqrtdk.attention(Q, K, V, return_aux=True)[1].effective_keys, "it is 1 / 'collision'"),
        (lambda: sqrtdk.attention(Q, K, V, return_aux=True)[1].logits, "return_weights=True"),
    ],
)
def test_an_unknown_name_is_told_with_the_nearest(read: Callable[[], Any], told: str) -> None:
    with pytest.raises(AttributeError, match=re.escape(told)):
        read()


def test_a_module_takes_the_names_that_the_function_takes() -> None:
    module = sqrtdk.nn.MultiHeadAttention(8, 2, window=3, score="cosine", scale="log_n", position="alibi")
    rule = sqrtdk.nn.MultiHeadAttention(
        8, 2, window=(2, 0), score=scores.cosine(), scale=scales.log_n(), position=positions.alibi(2)
    )
    rule.load_state_dict(module.state_dict())
    for found, expected in zip(*(m(X, X, X, is_causal=True, return_aux=True) for m in (module, rule)), strict=True):
        assert torch.equal(torch.stack([*found]), torch.stack([*expected]))
    turned = sqrtdk.nn.MultiHeadAttention(8, 2, position="rope")
    turned.load_state_dict(module.state_dict())
    by_hand = sqrtdk.nn.MultiHeadAttention(8, 2, position=positions.rope)
    by_hand.load_state_dict(module.state_dict())
    assert torch.equal(turned(X, X, X)[0], by_hand(X, X, X)[0])

"""One module in the place of the other, same state_dict: every mask gives equal output, or an error on one side.

`test_nn_torch_parity.py` has the grid of outputs and gradients over sizes; this file has the masks and flags.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sqrtdk.nn as modules
from sqrtdk.errors import InvalidTypeError, InvalidValueError, SqrtdkError, UnsupportedError
from sqrtdk.nn import MultiHeadAttention, TransformerBlock
from tests.nn.nn_cases import CASES, HEADS, LENGTH, MODEL, WIDTH
from tests.tolerances import complaint

D, H, N, L = 8, 2, 3, 5
F64 = torch.float64
FUTURE = torch.ones(L, L, dtype=torch.bool).triu(1)
SCATTERED = torch.rand(L, L, generator=torch.Generator().manual_seed(3)) < 0.4
SCATTERED[:, 0] = False  # every row sees key 0
PADDING = torch.arange(L).expand(N, L) >= torch.tensor([5, 3, 1])[:, None]
# torch warns of a bool mask beside a floating one, and gives what both mean
pytestmark = pytest.mark.filterwarnings("ignore:Support for mismatched")


def added(hidden: Tensor, lowest: float = -torch.inf) -> Tensor:
    return torch.zeros(hidden.shape, dtype=F64).masked_fill(hidden, lowest)


ATTN_MASKS: dict[str, Tensor | None] = {
    "none": None,
    "future": FUTURE,
    "future of heads": FUTURE.expand(N * H, L, L),
    "future added": added(FUTURE),
    "future lowest": added(FUTURE, torch.finfo(torch.float32).min),
    "scattered": SCATTERED,
    "scattered heads": SCATTERED.expand(N * H, L, L),
    "scattered added": added(SCATTERED),
    "bias": added(FUTURE) + torch.arange(float(L)),
}
PADDING_MASKS = {"none": None, "bool": PADDING, "added": added(PADDING)}


def pair(**options: Any) -> tuple[nn.Module, nn.Module]:
    theirs = nn.MultiheadAttention(D, H, dtype=F64, **options)
    ours = MultiHeadAttention(D, H, dtype=F64, **options)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def same(actual: Any, expected: Any) -> None:
    for found, wanted in zip(actual, expected, strict=True):
        assert (found is None) == (wanted is None)
        if wanted is not None:
            assert complaint(found, wanted, F64, length=MODEL, logit=100.0) is None


@pytest.mark.parametrize("evaluated", [False, True])  # torch's fused path, which has rules of its own
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", ATTN_MASKS)
def test_every_mask_is_torchs_or_refused(name: str, is_causal: bool, evaluated: bool) -> None:
    attn = ATTN_MASKS[name]
    theirs, ours = (module.train(not evaluated) for module in pair(batch_first=True))
    x = torch.randn(N, L, D, dtype=F64)
    for padding, need_weights, average in itertools.product(PADDING_MASKS.values(), (True, False), (True, False)):
        options = {"need_weights": need_weights, "average_attn_weights": average, "is_causal": is_causal}
        with torch.no_grad() if evaluated else nullcontext():
            if is_causal and attn is not None and not name.startswith("future"):
                with pytest.raises(InvalidValueError, match="is another") as caught:
                    ours(x, x, x, padding, attn_mask=attn, **options)
                assert "is_causal=False" in caught.value.hint
                continue
            if is_causal and attn is None:
                if not evaluated:
                    with pytest.raises(RuntimeError, match="Need attn_mask"):
                        theirs(x, x, x, padding, **options)
                expected = theirs(x, x, x, padding, attn_mask=FUTURE, **options | {"is_causal": False})
            else:
                expected = theirs(x, x, x, padding, attn_mask=attn, **options)
            same(ours(x, x, x, padding, attn_mask=attn, **options), expected)


@pytest.mark.parametrize("options", [{"add_zero_attn": True}, {"add_bias_kv": True}], ids=["zero", "bias"])
def test_appended_keys_are_seen_by_causal_rows(options: dict[str, bool]) -> None:
    theirs, ours = pair(**options)
    x = torch.randn(L, N, D, dtype=F64)
    for padding, need_weights in itertools.product(PADDING_MASKS.values(), (True, False)):
        expected = theirs(x, x, x, padding, need_weights, FUTURE)
        same(ours(x, x, x, padding, need_weights, FUTURE), expected)
        same(ours(x, x, x, padding, need_weights, is_causal=True), expected)
        with pytest.raises(UnsupportedError, match="who sees the appended keys"):
            ours(x, x, x, padding, need_weights, FUTURE, is_causal=True)


@pytest.mark.parametrize("norm_first", [False, True])
def test_the_block_stands_in_torchs_encoder(norm_first: bool) -> None:
    options: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": norm_first, "dtype": F64}
    layers = nn.TransformerEncoderLayer(D, H, 12, **options), TransformerBlock(D, H, 12, **options)
    theirs, ours = (nn.TransformerEncoder(layer, 2, enable_nested_tensor=False) for layer in layers)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(N, L, D, dtype=F64)
    for mask, padding in itertools.product((None, FUTURE, added(FUTURE), SCATTERED), PADDING_MASKS.values()):
        same([ours(x, mask, padding)], [theirs(x, mask, padding)])  # torch finds the causal mask and says is_causal
        same([ours(x, mask, padding).detach()], [theirs.eval()(x, mask, padding).detach()])
        theirs.train()


@pytest.mark.parametrize("padding", PADDING_MASKS.values(), ids=PADDING_MASKS)
def test_the_attention_stands_in_torchs_encoder_layer(padding: Tensor | None) -> None:
    """In evaluation the layer has a fast path, which asks its attention for more than a forward pass."""
    options: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "dtype": F64}
    theirs, layer = (nn.TransformerEncoderLayer(D, H, 12, **options) for _ in range(2))
    layer.self_attn = MultiHeadAttention(D, H, batch_first=True, dtype=F64)
    layer.load_state_dict(theirs.state_dict())
    ours = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    x = torch.randn(N, L, D, dtype=F64)
    same([ours(x, FUTURE, padding)], [theirs(x, FUTURE, padding)])
    with torch.no_grad():
        same([ours.eval()(x, FUTURE, padding)], [theirs.eval()(x, FUTURE, padding)])


def test_a_row_that_sees_nothing_is_nan_in_torch_and_zero_here() -> None:
    theirs, ours = pair()
    x, hidden = torch.randn(L, N, D, dtype=F64), torch.zeros(L, L, dtype=torch.bool)
    hidden[2] = True
    for mask in (hidden, added(hidden)):
        wanted, weights = theirs(x, x, x, attn_mask=mask)
        output, found = ours(x, x, x, attn_mask=mask)
        assert wanted[2].isnan().all() and weights[:, 2].isnan().all()  # noqa: PT018
        assert torch.equal(output[2], ours.out_proj.bias.expand(N, D))
        assert not found[:, 2].any()
        others = torch.arange(L) != 2
        same([output[others], found[:, others]], [wanted[others], weights[:, others]])


@pytest.mark.parametrize(
    ("keys", "masks"),
    [((L, N), {}), ((0, N), {}), ((L, 0), {}), ((L, N), {"attn_mask": torch.zeros(0, L, dtype=torch.bool)})],
    ids=["rows", "keys", "batch", "mask of no rows"],
)
def test_nothing_is_as_in_torch_or_no_number(keys: tuple[int, int], masks: dict[str, Tensor]) -> None:
    theirs, ours = pair()
    rows = 0 if "attn_mask" in masks or keys == (L, N) else L
    query, key = torch.randn(rows, keys[1], D, dtype=F64), torch.randn(*keys, D, dtype=F64)
    expected, actual = theirs(query, key, key, **masks), ours(query, key, key, **masks)
    assert [x.shape for x in actual] == [x.shape for x in expected]
    if keys[0]:
        same(actual, expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_torch_takes_or_refuses_otherwise_is_refused_with_a_hint() -> None:
    _, ours = pair(batch_first=True)
    x = torch.randn(N, L, D, dtype=F64)
    nested = torch.nested.nested_tensor([x[0], x[1, :3]])
    refused: list[tuple[tuple[Tensor, ...], dict[str, Any], type[SqrtdkError]]] = [
        ((nested,) * 3, {}, InvalidValueError),
        ((x,) * 3, {"key_padding_mask": PADDING.long()}, InvalidTypeError),
        ((x,) * 3, {"attn_mask": FUTURE.byte()}, InvalidTypeError),
        ((x,) * 3, {"attn_mask": PADDING}, InvalidValueError),
        ((x,) * 3, {"attn_mask": FUTURE.expand(N, L, L)}, InvalidValueError),
        ((x,) * 3, {"key_padding_mask": PADDING.T}, InvalidValueError),
    ]
    for inputs, masks, kind in refused:
        with pytest.raises(kind) as caught:
            ours(*inputs, **masks)
        assert caught.value.hint


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if len(case.inputs()) == 3])
def test_true_hides_in_every_module(name: str) -> None:
    case = CASES[name]
    module, inputs = case.make(dtype=F64), [x.double() for x in case.inputs()]
    hidden = torch.zeros(inputs[0].shape[-2], inputs[1].shape[-2], dtype=torch.bool)
    hidden[2:, 1] = True
    *_, weights = module(*inputs, attn_mask=hidden, need_weights=True)
    *_, again = module(*inputs, attn_mask=added(hidden), need_weights=True)
    assert not weights[..., 2:, 1].any()
    assert weights[..., :2, :].all()
    assert complaint(again, weights, F64, length=LENGTH, logit=100.0) is None


def test_every_module_says_so() -> None:
    assert modules.__doc__ is not None
    assert "**True where a key is hidden**" in modules.__doc__
    for case in CASES.values():
        forwards = (kind.forward.__doc__ or "" for kind in type(case.make()).__mro__ if hasattr(kind, "forward"))
        assert any("**True where the key is hidden from the row**" in text for text in forwards)


def test_the_function_has_it_the_other_way_round() -> None:
    from sqrtdk import attention

    q = torch.randn(2, HEADS, L, WIDTH, dtype=F64)
    module = modules.ScaledDotProductAttention(WIDTH)
    assert torch.equal(module(q, q, q, FUTURE), attention(q, q, q, ~FUTURE))

"""Bad input: each refusal by the words that matter and the numbers received, and the classes it may be caught by."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sqrtdk
from sqrtdk import positions, scales, scores
from sqrtdk.errors import InvalidTypeError, SqrtdkError

Q, K, V = (2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 6)
ENTRY = {"": sqrtdk.attention, "explain(): ": sqrtdk.explain}


class NoScore:
    """Not a score."""


def call(
    q: Any = Q, k: Any = K, v: Any = V, dtypes: tuple[torch.dtype, ...] = (torch.float32,) * 3, **kwargs: Any
) -> Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments of a call, made when it runs; shapes become tensors."""

    def make() -> tuple[tuple[Any, ...], dict[str, Any]]:
        tensors = (
            torch.zeros(x, dtype=d) if isinstance(x, tuple) else x for x, d in zip((q, k, v), dtypes, strict=True)
        )
        return tuple(tensors), kwargs

    return make


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


F32, F64, F16 = torch.float32, torch.float64, torch.float16
BAD: dict[str, tuple[Any, type[Exception], str]] = {
    # ranks and shapes
    "mask of no dimension": (call(attn_mask=zeros()), ValueError, "attn_mask has at least one dimension; got none"),
    "mask of a wider dtype": (
        call(attn_mask=zeros(5, 7, dtype=F64)),
        TypeError,
        "got torch.float64 beside torch.float32",
    ),
    "mask of a half dtype": (
        call(attn_mask=zeros(5, 7, dtype=F16)),
        TypeError,
        "got torch.float16 beside torch.float32",
    ),
    "mask elsewhere": (
        call(attn_mask=zeros(5, 7).to("meta")),
        ValueError,
        "attn_mask is on the device.*got meta and cpu",
    ),
    "bias elsewhere": (call(bias=zeros(5, 7).to("meta")), ValueError, "bias is on the device.*got meta and cpu"),
    "sinks elsewhere": (call(sinks=zeros(4).to("meta")), ValueError, "sinks is on the device.*got meta and cpu"),
    "scale elsewhere": (call(scale=zeros(5, 1).to("meta")), ValueError, "scale is on the device.*got meta and cpu"),
    "scale tensor of NaN": (call(scale=torch.tensor(math.nan)), ValueError, "a scale tensor is finite"),
    "scale tensor of infinity": (call(scale=torch.full((5, 1), math.inf)), ValueError, "a scale tensor is finite"),
    "scale rule not called": (
        call(scale=scales.log_n),
        TypeError,
        "scale is a number, a rule or a tensor; got <function",
    ),
    "sparse query": (call(q=torch.zeros(Q).to_sparse()), TypeError, "query is a dense tensor; got torch.sparse_coo"),
    "eight bits": (call(dtypes=(torch.float8_e4m3fn,) * 3), TypeError, "real floating dtype; got torch.float8_e4m3fn"),
    "query of one dimension": (call(q=(8,)), ValueError, r"query has the shape .*length, dim.*\(8,\)"),
    "key of one dimension": (call(k=(8,)), ValueError, r"key has the shape"),
    "value of no dimension": (call(v=()), ValueError, r"value has the shape"),
    "other width": (call(k=(2, 4, 7, 9)), ValueError, r"one head dimension.*8 and 9"),
    "other length of the value": (call(v=(2, 4, 6, 6)), ValueError, r"key and value have one length.*7 and 6"),
    "batches that do not broadcast": (call(k=(3, 4, 7, 8), v=(3, 4, 7, 6)), ValueError, r"broadcast.*\(3, 4, 7, 8\)"),
    "heads that differ without gqa": (call(k=(2, 2, 7, 8), v=(2, 2, 7, 6)), ValueError, r"broadcast.*\(2, 2, 7, 8\)"),
    "heads that do not divide": (
        call(k=(2, 3, 7, 8), v=(2, 3, 7, 6), enable_gqa=True),
        ValueError,
        r"divide.*query 4, key 3",
    ),
    "more key heads than query heads": (
        call(k=(2, 8, 7, 8), v=(2, 8, 7, 6), enable_gqa=True),
        ValueError,
        r"divide.*query 4, key 8",
    ),
    **{
        f"{name} of {value!r}": (call(**{name: value}), TypeError, rf"{name} is True or False; got {shown}")
        for name in ("is_causal", "enable_gqa", "causal_lower_right")
        for value, shown in (("yes", "'yes'"), ("", "''"), (1, "1"), (0, "0"), (None, "None"))
    },
    "head dimension zero of a cosine": (
        call((2, 4, 5, 0), (2, 4, 7, 0), score=scores.cosine()),
        ValueError,
        r"head dimension is at least 1; got 0",
    ),
    # types
    "a list for a query": (call(q=[[1.0]]), TypeError, r"query is a tensor; got list"),
    "None for a value": (call(v=None), TypeError, r"value is a tensor; got NoneType"),
    "complex": (call(dtypes=(torch.complex64,) * 3), TypeError, r"query has a real floating dtype.*complex64"),
    "integers": (call(dtypes=(F32, torch.int64, F32)), TypeError, r"key has a real floating dtype.*int64"),
    "bools": (call(dtypes=(F32, F32, torch.bool)), TypeError, r"value has a real floating dtype.*bool"),
    "mixed dtypes": (call(dtypes=(F32, F16, F32)), TypeError, r"one dtype.*float32.*key torch.float16"),
    "mixed wide dtypes": (call(dtypes=(F64, F64, F32)), TypeError, r"one dtype.*value torch.float32"),
    "other device": (
        call(k=torch.zeros(K, device="meta")),
        ValueError,
        r"one device.*query cpu.*key meta",
    ),
    # scale
    "NaN scale": (call(scale=math.nan), ValueError, r"scale is a finite number.*nan"),
    "infinite scale": (call(scale=math.inf), ValueError, r"scale is a finite number.*inf"),
    "minus infinite scale": (call(scale=-math.inf), ValueError, r"scale is a finite number.*-inf"),
    "boolean scale": (call(scale=True), TypeError, r"scale is a number.*True"),
    "scale of a name near one": (call(scale="sqrt_d_k"), ValueError, r"scale='sqrt_d_k' is no name.*mean 'sqrt_dk'"),
    "scale of a name that needs a number": (call(scale="fixed"), ValueError, r"scale='fixed' needs value"),
    "complex scale": (call(scale=1j), TypeError, r"scale is a number.*1j"),
    "integer scale tensor": (call(scale=torch.tensor(1)), TypeError, r"scale.*floating dtype.*int64"),
    "boolean scale tensor": (call(scale=torch.tensor(True)), TypeError, r"scale.*floating dtype.*bool"),
    "scale tensor for keys": (call(scale=zeros(1, 7)), ValueError, r"scale broadcasts to \(2, 4, 5, 1\).*\(1, 7\)"),
    "scale tensor of too many dimensions": (call(scale=zeros(2, 2, 4, 5, 1)), ValueError, r"scale broadcasts to"),
    "learned scale of other heads": (call(scale=scales.learned(3)), ValueError, r"each query head.*3 for 4"),
    "NaN rule": (call(scale=object()), TypeError, r"scale is a number"),
    # masks, bias, sinks
    "mask of integers": (call(attn_mask=zeros(5, 7, dtype=torch.int64)), TypeError, r"attn_mask is a bool.*int64"),
    "mask of lists": (call(attn_mask=[[True]]), TypeError, r"attn_mask is a bool.*list"),
    "complex mask": (call(attn_mask=zeros(5, 7, dtype=torch.complex64)), TypeError, r"attn_mask is a bool.*complex64"),
    "mask of another length": (
        call(attn_mask=zeros(5, 8)),
        ValueError,
        r"attn_mask broadcasts to \(2, 4, 5, 7\).*\(5, 8\)",
    ),
    "mask turned round": (call(attn_mask=zeros(7, 5)), ValueError, r"attn_mask broadcasts to .*\(7, 5\)"),
    "mask of too many dimensions": (call(attn_mask=zeros(1, 2, 4, 5, 7)), ValueError, r"attn_mask broadcasts to"),
    "key padding mask as it is": (
        call(attn_mask=zeros(2, 7, dtype=torch.bool)),
        ValueError,
        r"attn_mask broadcasts to .*\(2, 7\)",
    ),
    "bool bias": (call(bias=zeros(5, 7, dtype=torch.bool)), TypeError, r"bias is a floating tensor.*bool"),
    "bias of another length": (call(bias=zeros(5, 6)), ValueError, r"bias broadcasts to \(2, 4, 5, 7\).*\(5, 6\)"),
    "bias of a name near one": (call(bias="alibbi"), ValueError, r"bias='alibbi' is no name.*mean 'alibi'"),
    "bias of a name that needs a table": (call(bias="t5_bias"), ValueError, r"bias='t5_bias' needs "),
    "bias of a number": (call(bias=1.0), TypeError, r"bias is a tensor or a term.*1\.0"),
    "ALiBi of other heads": (call(bias=positions.alibi(3)), ValueError, r"ALiBi is made for 3 heads"),
    "Shaw of another width": (call(bias=positions.shaw(4, max_distance=2)), ValueError, r"head dimension of 4"),
    "sinks of other heads": (call(sinks=zeros(3)), ValueError, r"sinks .*\(4,\).*\(3,\)"),
    "sinks of other rows": (call(sinks=zeros(2, 4, 7, 1)), ValueError, r"sinks broadcasts to \(2, 4, 5, 1\).*7"),
    "sinks of pairs": (call(sinks=zeros(2, 4, 5, 7)), ValueError, r"sinks broadcasts to \(2, 4, 5, 1\)"),
    "sinks of integers": (call(sinks=zeros(4, dtype=torch.int64)), ValueError, r"sinks .*floating.*int64"),
    "NaN sinks": (call(sinks=math.nan), ValueError, r"sinks is a finite number.*nan"),
    "boolean sinks": (call(sinks=True), TypeError, r"sinks is a number.*True"),
    # numbers
    "softcap zero": (call(softcap=0.0), ValueError, r"softcap is a finite number above 0.*0"),
    "negative softcap": (call(softcap=-1.0), ValueError, r"softcap is a finite number above 0.*-1"),
    "NaN softcap": (call(softcap=math.nan), ValueError, r"softcap is a finite number.*nan"),
    "infinite softcap": (call(softcap=math.inf), ValueError, r"softcap is a finite number.*inf"),
    "boolean softcap": (call(softcap=True), TypeError, r"softcap is a number.*True"),
    "dropout above one": (call(dropout_p=1.5), ValueError, r"dropout_p is from 0 to 1.*1\.5"),
    "negative dropout": (call(dropout_p=-0.1), ValueError, r"dropout_p is from 0 to 1.*-0\.1"),
    "NaN dropout": (call(dropout_p=math.nan), ValueError, r"dropout_p is from 0 to 1.*nan"),
    "window of one size": (call(window=(3,)), TypeError, r"window is \(left, right\).*\(3,\)"),
    "window of a number": (call(window=3), ValueError, r"window=3 is 3 keys .* not causal"),
    "window of no key": (call(window=0, is_causal=True), ValueError, r"window is a number of keys, at least 1.*0"),
    "window below minus one": (call(window=(-2, 0)), ValueError, r"side of the window.*-2"),
    "window of a fraction": (call(window=(1.5, 0)), ValueError, r"side of the window.*1\.5"),
    "window of bools": (call(window=(True, 0)), TypeError, r"window is \(left, right\).*True"),
    # scores
    "score of a name near one": (call(score="cosin"), ValueError, r"score='cosin' is no name.*mean 'cosine'"),
    "score of a name that needs a weight": (call(score="bilinear"), ValueError, r"score='bilinear' needs weight"),
    "score not called": (call(score=scores.cosine), TypeError, r"score is a score of sqrtdk.scores.*cosine"),
    "score of another kind": (call(score=NoScore()), TypeError, r"score is a score of sqrtdk.scores.*NoScore"),
    "bilinear of another width": (call(score=scores.bilinear(torch.eye(5))), ValueError, r"bilinear.*"),
    "distance of other widths": (call(k=(2, 4, 7, 9), score=scores.distance()), ValueError, r"distance score"),
}
IMPL_OR_AUX: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "unknown implementation": ({"impl": "flash"}, ValueError, r"impl is 'flash'"),
    "no implementation": ({"impl": None}, ValueError, r"impl is None"),
    "statistics of words": ({"return_aux": "lse"}, TypeError, r"return_aux is True, or an AuxRequest.*lse"),
    "weights of words": ({"return_weights": "yes"}, TypeError, r"return_weights is True or False.*yes"),
    "weights that are never held": (
        {"return_weights": True, "impl": "tiled"},
        NotImplementedError,
        "'tiled' never holds the weights",
    ),
}
NOT_FUSED: dict[str, tuple[dict[str, Any], str]] = {
    "softcap": ({"softcap": 5.0}, r"'fused'.*softcap"),
    "sinks": ({"sinks": 0.0}, r"'fused'.*sinks"),
    "a score of pairs": ({"score": scores.keras_additive()}, r"'fused'.*no dot product"),
    "a position term of q": ({"bias": positions.shaw(8, max_distance=2)}, r"'fused'.*position term"),
}


@pytest.mark.parametrize("prefix", ENTRY, ids=["attention", "explain"])
@pytest.mark.parametrize("name", [*BAD, *IMPL_OR_AUX])
def test_bad_input_is_refused_with_its_rule(name: str, prefix: str) -> None:
    make, kind, words = BAD[name] if name in BAD else (call(**IMPL_OR_AUX[name][0]), *IMPL_OR_AUX[name][1:])
    args, kwargs = make()
    with pytest.raises(kind, match=words) as caught:
        ENTRY[prefix](*args, **kwargs)
    assert str(caught.value).startswith(prefix)
    assert isinstance(caught.value, SqrtdkError)
    assert caught.value.hint


def test_explain_names_the_sizes_that_were_given() -> None:
    with pytest.raises(ValueError, match=r"query \(1, 4, 8, 16\).*key \(1, 4, 10, 16\)"):
        sqrtdk.explain(torch.zeros(1, 4, 8, 16), *torch.zeros(2, 1, 4, 10, 16), bias=positions.alibi(3))


@pytest.mark.parametrize("name", NOT_FUSED)
def test_what_torchs_kernels_lack_is_unsupported_and_never_falls_back(name: str) -> None:
    kwargs, words = NOT_FUSED[name]
    with pytest.raises(NotImplementedError, match=words) as caught:
        sqrtdk.attention(torch.zeros(Q), torch.zeros(K), torch.zeros(V), impl="fused", **kwargs)
    assert isinstance(caught.value, SqrtdkError)
    assert caught.value.hint


def test_gradients_of_statistics_are_unsupported_on_torchs_kernels() -> None:
    q = torch.zeros(Q, requires_grad=True)
    for request in (sqrtdk.AuxRequest(lse=True), sqrtdk.AuxRequest(entropy_nats=True)):
        with pytest.raises(NotImplementedError, match=r"'fused'.*gradient of lse and entropy"):
            sqrtdk.attention(q, torch.zeros(K), torch.zeros(V), impl="fused", return_aux=request)


def test_good_calls_next_to_the_bad_ones_run() -> None:
    q, k, v = torch.zeros(Q), torch.zeros(K), torch.zeros(V)
    good: list[dict[str, Any]] = [
        {"scale": 2},
        {"scale": torch.tensor(0.5)},
        {"attn_mask": zeros(2, 1, 1, 7, dtype=torch.bool)},
        {"window": [3, -1]},
        {"dropout_p": 1},
        {"sinks": 0},
        {"bias": positions.alibi(4)},
        {"scale": scales.learned(4)},
        {"softcap": 1},
    ]
    for kwargs in good:
        assert sqrtdk.attention(q, k, v, **kwargs).shape == (2, 4, 5, 6)


def test_a_statistic_is_asked_for_by_true() -> None:
    with pytest.raises(InvalidTypeError, match="lse is True or False; got 'yes'"):
        sqrtdk.AuxRequest(lse="yes")  # type: ignore[arg-type]

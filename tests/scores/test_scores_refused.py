"""What a score refuses: each with the rule, the numbers received and a hint."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import nn

from sqrtdk import scores
from sqrtdk.errors import InvalidTypeError, InvalidValueError, SqrtdkError
from sqrtdk.scores import LearnedGain


def refused(kind: type[SqrtdkError], message: str, make: object, *arguments: object) -> None:
    with pytest.raises(kind, match=f"(?m)^{re.escape(message)}$") as caught:
        make(*arguments)  # type: ignore[operator]
    assert caught.value.hint


def test_a_cosine_of_bad_arguments() -> None:
    refused(InvalidValueError, "norm is one of l2, rms, layer; got 'l1'", scores.cosine, "l1")
    for bad, shown in ((True, "True (bool)"), ("2", "'2' (str)"), ([2.0], "a list")):
        refused(InvalidTypeError, f"a gain is a real number; got {shown}", scores.cosine, "l2", bad)
    refused(InvalidValueError, "a gain is a finite number; got nan", scores.cosine, "l2", math.nan)
    refused(InvalidTypeError, "a gain has a floating dtype; got torch.int64", scores.cosine, "l2", torch.tensor(2))
    two = "a gain of two dimensions is ambiguous; got (4, 8)"
    refused(InvalidValueError, two, scores.cosine, "l2", torch.ones(4, 8))
    refused(InvalidValueError, "eps of a cosine score is above 0; got 0.0", lambda: scores.cosine(eps=0.0))
    refused(
        InvalidTypeError, "eps of a cosine score is a real number; got True (bool)", lambda: scores.cosine(eps=True)
    )


def test_a_gain_that_does_not_fit_the_call() -> None:
    query = torch.randn(1, 4, 3, 8)
    for shape, of in (
        ((3,), query),
        ((3, 1, 1), query),
        ((4, 1, 7), query),
        ((4,), query[0, 0]),
        ((2, 4, 1, 1), query),
    ):
        fold = scores.cosine(gain=torch.ones(shape)).fold
        message = f"a gain of shape {shape} does not fit a query of shape {tuple(of.shape)}"
        refused(InvalidValueError, message, fold, of, of)
    fold = scores.cosine(gain=nn.Identity()).fold
    with pytest.raises(TypeError):  # a module that wants an input is not a gain
        fold(query, query)
    refused(
        InvalidTypeError,
        "a gain module gives a floating tensor; got int",
        scores.cosine(gain=_Number()).fold,
        query,
        query,
    )


class _Number(nn.Module):
    def forward(self) -> int:
        return 3


def test_a_learned_gain_of_bad_arguments() -> None:
    refused(InvalidTypeError, "heads of a gain is a whole number; got 4.0 (float)", LearnedGain, 4.0)
    refused(InvalidValueError, "heads of a gain is at least 1; got 0", LearnedGain, 0)
    refused(InvalidValueError, "init of a gain is above 0; got -1.0", LearnedGain, 4, -1.0)
    refused(InvalidValueError, "the maximum of a gain is a finite number; got inf", LearnedGain, 4, 10.0, math.inf)
    refused(
        InvalidValueError,
        "a gain starts at its maximum or below; got 200.0 and a maximum of 100.0",
        LearnedGain,
        4,
        200.0,
    )


def test_weights_of_the_wrong_kind() -> None:
    one, two, three = torch.ones(4), torch.ones(4, 4), torch.ones(2, 4, 4)
    bilinear = "the weight of a bilinear score"
    for make in (scores.bilinear, scores.luong_general):
        refused(InvalidTypeError, f"{bilinear} is a tensor; got list", make, [[1.0]])
        refused(InvalidTypeError, f"{bilinear} has a floating dtype; got torch.int64", make, two.long())
        refused(InvalidTypeError, f"{bilinear} has a floating dtype; got torch.complex64", make, two.cfloat())
        refused(InvalidValueError, f"{bilinear} is (E, Ek) or (Hq, E, Ek); got (4,)", make, one)
    message = "v of an additive score is (A,) or (Hq, A); got (2, 4, 4)"
    refused(InvalidValueError, message, scores.additive, three, two, two)
    message = "query_weight of an additive score is (E, A) or (Hq, E, A); got (4,)"
    refused(InvalidValueError, message, scores.additive, one, one, two)
    message = "key_weight of an additive score is (Ek, A) or (Hkv, Ek, A); got (4,)"
    refused(InvalidValueError, message, scores.additive, one, two, one)
    message = "the bias of an additive score is (A,) or (Hq, A); got ()"
    refused(InvalidValueError, message, scores.additive, one, two, two, torch.tensor(1.0))
    message = "the weights of an additive score have one hidden width; got 4, 4, 4, 3"
    refused(InvalidValueError, message, scores.additive, one, two, two, torch.ones(3))
    message = "v of a Keras additive score is (E,) or (Hq, E); got ()"
    refused(InvalidValueError, message, scores.keras_additive, torch.tensor(1.0))
    message = "v of a concat score is (A,) or (Hq, A); got ()"
    refused(InvalidValueError, message, scores.luong_concat, torch.tensor(1.0), two)
    message = "the weight of a concat score is (E + Ek, A) or (H, E + Ek, A); got (4,)"
    refused(InvalidValueError, message, scores.luong_concat, one, one)
    message = "v and the weight of a concat score have one hidden width; got 4 and 3"
    refused(InvalidValueError, message, scores.luong_concat, one, torch.ones(8, 3))


def test_weights_that_do_not_fit_the_call() -> None:
    q, k = torch.randn(1, 4, 3, 5), torch.randn(1, 2, 6, 7)
    refused(
        InvalidValueError,
        "the weight of a bilinear score takes a query of 7 features; got 5",
        scores.bilinear(torch.ones(7, 5)).fold,
        q,
        k,
    )
    refused(
        InvalidValueError,
        "the weight of a bilinear score has a part for each of 3 heads; got a query of 4 heads",
        scores.bilinear(torch.ones(3, 5, 7)).fold,
        q,
        k,
    )
    v, wq, wk = torch.ones(8), torch.ones(5, 8), torch.ones(7, 8)
    for score, message in (
        (scores.additive(v, wk, wk), "query_weight of an additive score takes a query of 7 features; got 5"),
        (scores.additive(v, wq, wq), "key_weight of an additive score takes a key of 5 features; got 7"),
        (
            scores.additive(v, wq.expand(2, -1, -1), wk),
            "query_weight of an additive score has a part for each of 2 heads; got a query of 4 heads",
        ),
        (
            scores.additive(v, wq, wk.expand(4, -1, -1)),
            "key_weight of an additive score has a part for each of 4 heads; got a key of 2 heads",
        ),
        (
            scores.additive(v.expand(2, -1), wq, wk),
            "v of an additive score has a part for each of 2 heads; got a query of 4 heads",
        ),
        (
            scores.additive(v, wq, wk, v.expand(3, -1)),
            "the bias of an additive score has a part for each of 3 heads; got a query of 4 heads",
        ),
        (scores.keras_additive(), "a Keras additive score takes a query and a key of the same features; got 5 and 7"),
        (scores.distance(), "a distance score takes a query and a key of the same features; got 5 and 7"),
        (
            scores.luong_concat(v, torch.ones(11, 8)),
            "the weight of a concat score takes 11 features of q and k together; got 5 + 7",
        ),
        (
            scores.luong_concat(v, torch.ones(4, 12, 8)),
            "the weight of a concat score for each head needs as many query as key heads; got 4 and 2",
        ),
        (
            scores.luong_concat(v.expand(2, -1), torch.ones(12, 8)),
            "v of a concat score has a part for each of 2 heads; got a query of 4 heads",
        ),
    ):
        refused(InvalidValueError, message, score.prepare, q, k)
    message = "v of a Keras additive score has one number for each of 5 features; got 8"
    refused(InvalidValueError, message, scores.keras_additive(v).prepare, q, q)
    message = "v of a Keras additive score has a part for each of 2 heads; got a query of 4 heads"
    refused(InvalidValueError, message, scores.keras_additive(torch.ones(2, 5)).prepare, q, q)


def test_weights_for_heads_refuse_inputs_without() -> None:
    message = "the weight of a bilinear score has a part for each of 2 heads; got a query of 1 heads"
    refused(InvalidValueError, message, scores.bilinear(torch.ones(2, 5, 5)).fold, torch.ones(3, 5), torch.ones(4, 5))


def test_fresh_weights_of_bad_sizes() -> None:
    refused(InvalidTypeError, "hidden is a whole number; got 8.0 (float)", scores.fresh_additive, 4, 4, 8.0)
    refused(InvalidValueError, "query_dim is at least 1; got 0", scores.fresh_additive, 0, 4, 8)
    refused(InvalidValueError, "key_dim is at least 1; got 0", scores.fresh_bilinear, 4, 0)
    refused(InvalidValueError, "heads is at least 1; got 0", lambda: scores.fresh_bilinear(4, 4, heads=0))

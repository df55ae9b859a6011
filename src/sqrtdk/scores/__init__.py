"""Score functions: the comparison of q and k before the scale, by name in `SCORES`."""

from collections.abc import Callable

from sqrtdk._leads import says_if_called as _says_if_called
from sqrtdk.scores._additive import additive as additive
from sqrtdk.scores._additive import keras_additive as keras_additive
from sqrtdk.scores._additive import luong_concat as luong_concat
from sqrtdk.scores._bilinear import bilinear as bilinear
from sqrtdk.scores._bilinear import luong_general as luong_general
from sqrtdk.scores._cosine import LearnedGain as LearnedGain
from sqrtdk.scores._cosine import cosine as cosine
from sqrtdk.scores._distance import distance as distance
from sqrtdk.scores._distance import laplace as laplace
from sqrtdk.scores._distance import rbf as rbf
from sqrtdk.scores._fresh import fresh_additive as fresh_additive
from sqrtdk.scores._fresh import fresh_bilinear as fresh_bilinear
from sqrtdk.scores._score import CallableScore as CallableScore
from sqrtdk.scores._score import FoldedScore as FoldedScore
from sqrtdk.scores._score import PairScore as PairScore
from sqrtdk.scores._score import dot as dot

SCORES: dict[str, Callable[..., FoldedScore | PairScore]] = {
    "dot": dot,
    "cosine": cosine,
    "bilinear": bilinear,
    "luong_general": luong_general,
    "additive": additive,
    "keras_additive": keras_additive,
    "luong_concat": luong_concat,
    "distance": distance,
    "rbf": rbf,
    "laplace": laplace,
}

_says_if_called(__name__)

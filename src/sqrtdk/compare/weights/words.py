"""Says which weights of the two sides belong together: what is the same, what differs and how, what has no partner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from sqrtdk.compare.sides import ModelSide
from sqrtdk.compare.weights.changes import HeldWeights
from sqrtdk.compare.weights.pairing import NUMBER_OF_LAYER, WeightPair, pair_weights, weights_of
from sqrtdk.compare.weights.records import WeightDiff, WeightsReport
from sqrtdk.compare.words import short
from sqrtdk.frontends.module import ForeignModule
from sqrtdk.messages import Message, joined

_MOST_NAMES = 3  # names in a sentence
_MOST_WEIGHT_SENTENCES = 6
_LAYOUT_WORDS = ("same", "reshaped", "transposed", "axes", "permuted", "part")


def hold_weights(a: ModelSide, b: ModelSide) -> HeldWeights | None:
    """Return the weights of both sides, paired; None if a side has none, as a file.

    Args:
        a: side A.
        b: side B.
    """
    if a.module is None or b.module is None:
        return None
    one, other = weights_of(a.module), weights_of(b.module)
    return HeldWeights(pair_weights(one, other), one, other)


def weights_report(held: HeldWeights | None, a: ModelSide, b: ModelSide) -> WeightsReport | None:
    """Return the records of the weights of both sides; None if a side has none.

    Args:
        held: the weights.
        a: side A.
        b: side B.
    """
    if held is None:
        return None
    found = held.pairs
    unread = [side.module.unread if isinstance(side.module, ForeignModule) else () for side in (a, b)]
    pairs = tuple(_record(pair, held.a[pair.a], held.b[pair.b]) for pair in found.pairs)
    plain = [one.a == one.b and one.layout == "same" and one.numbers == "same" and not one.turned for one in pairs]
    return WeightsReport(
        alike=sum(plain),
        named_alike=found.named_alike,
        pairs=tuple(one for one, is_plain in zip(pairs, plain, strict=True) if not is_plain),
        alone_a=found.alone_a,
        alone_b=found.alone_b,
        unread_a=unread[0],
        unread_b=unread[1],
        known=a.known,
    )


def _record(pair: WeightPair, a: Tensor, b: Tensor) -> WeightDiff:
    difference, b = None, b.to(a.device)
    if pair.numbers == "other" or pair.turned:
        size = a.double().square().mean().sqrt()
        off = (pair.layout.as_a(a, b).double() - a.double()).square().mean().sqrt()
        difference = float(off / size) if float(size) else None
    constant = pair.numbers == "other" and b.numel() > 1 and bool((b == b.reshape(-1)[0]).all())
    rows = {}
    for name, order in (("rows_a", pair.layout.rows_a), ("rows_b", pair.layout.rows_b)):
        if order is not None and pair.layout.kind == "part":
            whole = bool((order == torch.arange(len(order), device=order.device) + order[0]).all())
            rows[name] = f"{int(order.min())}-{int(order.max())}" if whole else f"{len(order)}"
    return WeightDiff(
        pair.a, pair.b, pair.layout.kind, pair.numbers, difference=difference, factor=pair.factor, dtype=pair.dtype,
        tied=pair.tied, turned=pair.turned, expected=pair.expected,
        constant=float(b.reshape(-1)[0]) if constant else None, **rows,
    )  # fmt: skip


def weight_sentences(report: WeightsReport | None, said: str) -> list[Message]:
    """Return the sentences on weights: what differs, what has no partner, what is never read, and what is there.

    Nothing is said of two sides with mostly the same names: there a weight that differs is found by its name.

    Args:
        report: the records.
        said: other sentences of the report; a weight of B that they name is not named again.
    """
    if report is None or report.named_alike or not report.pairs:
        return []
    sentences = [*_differing([pair for pair in report.pairs if f"`{pair.b.removesuffix('.weight')}`" not in said])]
    for letter, other, alone in (("A", "B", report.alone_a), ("B", "A", report.alone_b)):
        if alone:
            sentences.append(
                Message("compare.weights.alone", side=letter, other=other, count=len(alone), names=_names(alone))
            )
    for letter, unread in (("A", report.unread_a), ("B", report.unread_b)):
        if unread:
            sentences.append(Message("compare.weights.unread", side=letter, names=_names(unread)))
    return [*sentences[:_MOST_WEIGHT_SENTENCES], *_summary(report)]


def _summary(report: WeightsReport) -> list[Message]:
    first: dict[str, WeightDiff] = {}
    for one in report.pairs:
        first.setdefault(one.a, one)
    kinds = Counter(pair.layout for pair in first.values())
    kinds["same"] += report.alike
    held, total = sum(kinds.values()), sum(kinds.values()) + len(report.alone_a)
    texts = [Message(f"compare.weights.layout.{kind}", count=kinds[kind]) for kind in _LAYOUT_WORDS if kinds[kind]]
    id = "all" if held == total else "some"
    examples = [p for p in first.values() if p.numbers != "other" and p.layout != "same"] or list(first.values())
    pair = examples[0]
    return [
        Message(
            f"compare.weights.{id}", count=held, total=total, kinds=joined(texts, "comma"), a=f"`{pair.a}`",
            b=f"`{pair.b}`",
        )
    ]  # fmt: skip


def _differing(pairs: Sequence[WeightDiff]) -> list[Message]:
    """Return a sentence for each way in which weights differ, with those of all layers in one."""
    groups: dict[tuple[object, ...], list[WeightDiff]] = {}
    for pair in pairs:
        if (key := _key(pair)) is not None:
            groups.setdefault(key, []).append(pair)
    sentences = []
    for (what, *_), members in groups.items():
        first = members[0]
        words: dict[str, str | int] = {
            "a": _names(x.a for x in members),
            "b": _names(x.b for x in members),
            "expected": _names(x.expected for x in members),
            "factor": f"{first.factor:.4g}",
            "sign": f"{first.factor:+.4g}",
            "dtype": first.dtype,
            "off": short(max(x.difference or 0.0 for x in members)),
            "constant": f"{first.constant or 0.0:.4g}",
            "count": len(members),
        }
        sentences.append(Message(f"compare.weights.{what}", **words))
    return sentences


def _key(pair: WeightDiff) -> tuple[object, ...] | None:
    role = _role(pair.a), _role(pair.b)
    if pair.turned:
        # `layout` is what the other matrices have
        return "turned" if pair.layout == "transposed" else "turned_back", *role
    if pair.constant is not None:
        return "constant", pair.constant, *role
    if pair.numbers in ("other", "offset"):
        return pair.numbers, *role
    if pair.numbers == "scaled":
        return "scaled", f"{pair.factor:.4g}", *role
    if pair.layout == "permuted":
        return "permuted", *role
    if pair.expected:
        return (
            "crossed",
            *role,
            pair.a.count(".") if NUMBER_OF_LAYER.findall(pair.a) == NUMBER_OF_LAYER.findall(pair.b) else pair.a,
        )
    return ("rounded", pair.dtype) if pair.numbers == "rounded" else None


def _role(name: str) -> str:
    return NUMBER_OF_LAYER.sub("#", name)


def _names(names: Iterable[str]) -> str:
    """Return names in backquotes, those of several layers as one: "`layers.#.wq`"."""
    every = list(dict.fromkeys(names))
    counts = Counter(map(_role, every))
    texts = dict.fromkeys(f"`{name if counts[_role(name)] == 1 else _role(name)}`" for name in every)
    if len(texts) <= _MOST_NAMES:
        return joined(list(texts), "and")
    listed = joined(list(texts)[:_MOST_NAMES], "comma")
    return Message("compare.weights.and_more", names=listed, count=len(texts) - _MOST_NAMES)

"""The sentences on gradients in a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sqrtdk._sites import ROOT_NAME
from sqrtdk.compare.backward.comparison import compare_backward
from sqrtdk.compare.backward.records import BackwardDiff, BackwardFault, GradientDiff
from sqrtdk.compare.records import DiffReport
from sqrtdk.compare.sides import ModelSide
from sqrtdk.compare.words import short, site_list
from sqrtdk.messages import Message, joined

_SENTENCES = {"attention": "compare.backward.attention", "parameter": "compare.backward.parameter"}


def with_gradients(report: DiffReport, a: ModelSide, b: ModelSide) -> DiffReport:
    """Return the report with the comparison of the gradients of its sides, and what it says in sentences."""
    found = compare_backward(a, b, report, report.seed)
    return replace(report, backward=found, paragraphs=(*report.paragraphs, *backward_paragraphs(found, report.same)))


def backward_paragraphs(found: BackwardDiff, forward: bool | None) -> tuple[Message, ...]:
    """Return what a comparison of gradients found, the cause first.

    Args:
        found: The comparison.
        forward: Whether the forward passes agree.

    Example:
        >>> print(*backward_paragraphs(BackwardDiff((GradientDiff("k", "attn", "attn", False, 3.0, 1e-6),)), True))
        Gradients of k differ in attn, by at most 3 of their size (rounding allows 1e-6).
    """
    if found.reason is not None:
        return (Message("compare.backward.reason", reason=found.reason),)
    sentences = _faults(found.faults)
    if found.first_module is not None:
        first = found.first_module
        id = "compare.backward.first" if first.a == first.b else "compare.backward.first_of_two"
        sentences.append(Message(id, a=first.a or ROOT_NAME, b=first.b or ROOT_NAME))
    sentences += [*_differences(found)]
    for side, names in (("A", found.only_a), ("B", found.only_b)):
        if names:
            sentences.append(Message("compare.backward.alone", side=side, names=site_list(names)))
    differs = any(one.same is False for one in found.gradients)
    if differs and forward is False:
        sentences.append(Message("compare.backward.forward"))
    if found.same is True:
        sentences.append(Message("compare.backward.same", count=len(found.gradients), output=found.output))
    unjudged = sum(one.same is None for one in found.gradients)
    if unjudged:
        sentences.append(Message("compare.backward.unjudged", count=unjudged, of=len(found.gradients)))
    return tuple(sentences)


def _faults(faults: Sequence[BackwardFault]) -> list[Message]:
    """Return a sentence for each fault, with all attentions that have it."""
    sites: dict[tuple[str, str, str | None], list[str]] = {}
    for fault in faults:
        sites.setdefault((fault.side.upper(), fault.text, fault.by), []).append(fault.site or ROOT_NAME)
    sentences = []
    for (side, text, by), at in sites.items():
        words = {"side": side, "site": site_list(at), "text": text}
        id = "compare.backward.fault" if by is None else "compare.backward.fault_in"
        sentences.append(Message(id, **words, **({} if by is None else {"by": by})))
    return sentences


def _differences(found: BackwardDiff) -> list[Message]:
    """Return a sentence for the attentions and one for the parameters whose gradients differ, with the largest."""
    sentences: list[Message] = []
    for kind, id in _SENTENCES.items():
        of_kind = [one for one in found.gradients if (one.name == "parameter") == (kind == "parameter")]
        wrong = [one for one in of_kind if one.same is False]
        if not wrong:
            continue
        # the backward pass reaches the last attention first: what it hands on makes all before it differ
        last = [one for one in wrong if one.a == wrong[-1].a] if kind == "attention" else wrong
        before = dict.fromkeys(one.a or ROOT_NAME for one in wrong if one not in last)
        wrong, worst = last, max(last, key=_difference)
        names = joined([*dict.fromkeys(one.name for one in wrong)], "comma")
        sites = site_list(dict.fromkeys(one.a or ROOT_NAME for one in wrong))
        figures = {"difference": f"{_difference(worst):.3g}", "allowed": short(worst.allowed)}
        sentences.append(Message(id, names=names, sites=sites, **figures))
        if before:
            sentences.append(Message("compare.backward.before", sites=site_list(before)))
    return sentences


def _difference(one: GradientDiff) -> float:
    return one.difference or 0.0

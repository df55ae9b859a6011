"""Compares what the two models return: every floating tensor, by a dotted name, with measured rounding.

A difference is a share of the size of A's tensor, by the root mean square of all entries; if only single entries
differ, by the largest entry of each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sqrtdk.compare.inside.suspect import QKV_LETTERS
from sqrtdk.compare.numbers import entry_differences
from sqrtdk.compare.outside.parts import LAYER_NUMBER
from sqrtdk.compare.outside.remedies import DifferenceChain, Entry
from sqrtdk.compare.paragraphs import OfOutputs
from sqrtdk.compare.records import UNKNOWN_CAUSE, ModuleCause, OutputDiff, PairDiff, kind_word
from sqrtdk.compare.rounding.precision import rounding_unit
from sqrtdk.compare.rounding.tensors import (
    FEW_ENTRIES,
    BlindRows,
    TensorOfBoth,
    TensorSize,
    as_rounding,
    errors_of,
    judge_tensor,
    padding_of,
    seeing_entries,
)
from sqrtdk.compare.sides import TRACE_KIND, FinerRun, ModelSide
from sqrtdk.compare.words import is_to_the_end, one_paragraph, reached_by, short, site_list, site_of_pair
from sqrtdk.messages import Message, joined

MOST_OUTPUTS_NAMED = 4  # names that a sentence lists


@dataclass(frozen=True, slots=True)
class OutputComparison:
    """The comparison of the outputs.

    Attributes:
        outputs: every tensor.
        missing: why none were compared.
        notes: what is left out.
        chain: what leads there.
        more: further sentences on what differs.
    """

    outputs: tuple[OutputDiff, ...] = ()
    missing: str | None = None
    notes: tuple[str, ...] = ()
    chain: DifferenceChain = field(default_factory=DifferenceChain)
    more: tuple[str, ...] = ()

    @property
    def follow(self) -> bool:
        """Return whether the differences of the attentions explain all differences of the outputs."""
        return _follow(self.chain)

    @property
    def causes(self) -> tuple[ModuleCause, ...]:
        """Return the causes outside attention, in the order of the chain; layers that differ alike have them once."""
        return tuple(cause for entry in _folded(self.chain) for cause in _causes_of(entry))


def _follow(chain: DifferenceChain) -> bool:
    return not chain.entries and chain.whole and chain.beside and chain.inside


def pair_outputs(a: ModelSide, b: ModelSide, blind: BlindRows) -> tuple[tuple[TensorOfBoth, ...], OutputComparison]:
    """Return the outputs of both sides that can be compared, and what is known about the others.

    They are paired by name. If A's first output has no partner, it gets an output of B with its shape: a model of
    transformers returns `logits`, its port a tensor. If B has several, such as the states after every layer, the
    closest one is taken. Places in a tuple are names only if both sides have the same places.

    Args:
        a: side A.
        b: side B.
        blind: rows that are left out, as `rows_left_out` returns them.

    Returns:
        The pairs of tensors, and a comparison with the outputs of unlike shapes, notes, and why nothing can be
        compared.
    """
    for letter, side in (("A", a), ("B", b)):
        if side.outputs is None:
            return (), OutputComparison(
                missing=Message("outputs.missing.kind", side=letter, kind=kind_word(side.info.kind))
            )
        if not side.outputs:
            return (), OutputComparison(missing=Message("outputs.missing.none", side=letter))
    one, other = a.outputs or {}, b.outputs or {}
    names = {name: name for name in one if name in other and one[name].shape == other[name].shape}
    first = next(iter(one))
    left = [name for name in other if name not in names and other[name].shape == one[first].shape]
    # `model(ids).logits` on one side, `model(ids)` on the other
    if first not in names and left:
        names[first] = min(
            left,
            key=lambda name: float(entry_differences(one[first].cpu().double(), other[name].cpu().double()).norm()),
        )
    dtypes = [getattr(torch, side.info.dtype, None) for side in (a, b)]
    paired = []
    for name in filter(names.__contains__, one):
        x, y = one[name].cpu(), other[names[name]].cpu()
        units = [
            max(rounding_unit(own or z.dtype), rounding_unit(z.dtype)) for own, z in zip(dtypes, (x, y), strict=True)
        ]
        rows = seeing_entries(x.shape, blind, cache=name.rpartition(".")[2] in ("key", "value"))
        paired.append(TensorOfBoth(name, names[name], x, y, rows, (units[0], units[1])))
    taken = {*names.values()}
    shared = [name for name in one if name in other and name not in names and name not in taken]
    unlike = [name for name in shared if not name.isdecimal() or set(one) == set(other)]
    if not names and not unlike:
        return (), OutputComparison(missing=_shapes(*(next(iter(side.values())) for side in (one, other))))
    shapes_of = {name: _shapes(one[name], other[name]) for name in unlike}
    alone = ("A", [name for name in one if name not in names]), ("B", [name for name in other if name not in taken])
    notes = []
    for letter, every in alone:
        if lost := [name for name in every if name not in unlike]:
            notes.append(Message("compare.note.alone", side=letter, names=_names_text(lost)))
    notes += [
        Message("compare.note.padding", out=int(hidden.sum()), rows=hidden.numel())
        for hidden in padding_of(a, b).values()
        if any(both.rows is not None for both in paired)
    ]
    differ = tuple(OutputDiff(name, False, None, None, reason) for name, reason in shapes_of.items())
    return tuple(paired), OutputComparison(differ, notes=tuple(notes))


def _shapes(a: Tensor, b: Tensor) -> Message:
    return Message("outputs.shapes", one=f"{tuple(a.shape)}", other=f"{tuple(b.shape)}")


def compare_outputs(
    paired: Sequence[TensorOfBoth], exact: Sequence[FinerRun | None] | None, attentions: int
) -> tuple[OutputDiff, ...]:
    """Return whether each pair of outputs agrees within rounding, in the order given.

    Differences and allowances are relative to the size of A's output.

    Args:
        paired: pairs from `pair_outputs`.
        exact: float64 runs of A and B, None for a side without one; None or () if one rounding explains every
            difference.
        attentions: number of attentions before the outputs, which the allowance of an unmeasured output depends on.
    """
    errors = []
    for both in paired:
        names = (both.name, both.name_b)
        known = [None if one is None else one.outputs.get(name) for one, name in zip(exact or (), names, strict=False)]
        errors.append(errors_of(both, known or None))
    # An output of few entries shows little of its own rounding, so it is allowed at least that of the large ones.
    least = [_largest_share(paired, errors, side) for side in (0, 1)]
    compared = []
    for both, measured in zip(paired, errors, strict=True):
        verdict = judge_tensor(both, measured, attentions, least)
        gap, allowed = (x / verdict.size if verdict.size else 0.0 for x in (verdict.gap, verdict.allowed))
        if verdict.same is None and verdict.reason is None:
            compared.append(OutputDiff(both.name, None, None, None))
            continue
        most = allowed if math.isfinite(allowed) else None
        gap = math.inf if math.isinf(verdict.gap) else gap
        compared.append(OutputDiff(both.name, verdict.same, gap, most, verdict.reason))
    return tuple(compared)


def _largest_share(paired: Sequence[TensorOfBoth], errors: Sequence[Sequence[TensorSize | None]], side: int) -> float:
    """Return the largest rounding of a side's outputs with many entries, as a share of their size."""
    shares = [0.0]
    for both, measured in zip(paired, errors, strict=True):
        error, size = as_rounding(both, measured)[side], both.sizes[side][0]
        if error is not None and both.a.numel() >= FEW_ENTRIES and 0.0 < size < math.inf and math.isfinite(error[0]):
            shares.append(error[0] / size)
    return max(shares)


# -- in words ----------------------------------------------------------------------------------------------------------


def since_of(chain: DifferenceChain) -> str:
    """Return where the difference enters and what follows from it, as half sentences; "" if nothing is known.

    Example:
        >>> from sqrtdk.compare.records import FirstModule
        >>> head = Entry(FirstModule("head", "head", "model.py:42"), "`head`", "Linear in A, LowRank in B")
        >>> since_of(DifferenceChain((head,), whole=True))
        'the first difference is in `head` (model.py:42): Linear in A, LowRank in B; nothing else differs'
    """
    halves = [Message(f"outputs.half.{name}", **values) for name, values in _steps(chain)]
    return joined(halves) if halves else ""


def _causes_of(entry: Entry) -> Iterator[ModuleCause]:
    module = entry.module
    if not entry.parts:
        yield ModuleCause(UNKNOWN_CAUSE, module.a, module.b, None, None, False, "", entry.others, module.place)
    for part in entry.parts:
        yield ModuleCause(
            part.row.name, module.a, module.b, part.found.a, part.found.b, entry.proven, part.text, entry.others,
            module.place, part.fix(module.b),
        )  # fmt: skip


def _folded(chain: DifferenceChain) -> Sequence[Entry]:
    """Return the places of the chain; layers that differ alike are one."""
    kinds: dict[str, Entry] = {}
    for entry in chain.entries:
        kind = LAYER_NUMBER.sub("#", f"{entry.where}: {entry.how}")
        known = kinds.setdefault(kind, entry)
        if known is not entry:
            kinds[kind] = replace(known, others=(*known.others, entry.module.a, *entry.others))
    return list(kinds.values())


def _steps(chain: DifferenceChain) -> list[tuple[str, dict[str, str]]]:
    """Return the chain step by step: the name of each sentence, as a half and as a whole one, and its values."""
    if not chain.entries:
        if _follow(chain):
            return [("follows", {})]
        return [("outside", {})] if chain.whole and chain.beside else []
    steps: list[tuple[str, dict[str, str]]] = [("beside", {})] if chain.beside else []
    for number, entry in enumerate(_folded(chain)):
        place = entry.where
        if entry.module.place:
            place = Message("joins.brackets", first=place, second=entry.module.place)
        if entry.how:
            place = Message("joins.colon", first=place, second=entry.how)
        steps.append(("next" if number else "another" if chain.beside else "first", {"place": place}))
        if entry.others:
            steps.append(("same", {"modules": site_list(entry.others)}))
    if chain.whole and not chain.inside:
        steps.append(("outside", {}))
    elif chain.whole:
        steps.append(("rest" if chain.attentions and not chain.beside else "nothing_else", {}))
    return steps


def differing_outputs(outputs: Sequence[OutputDiff]) -> list[OutputDiff]:
    """Return the outputs whose shapes agree and whose numbers differ by more than rounding."""
    return [one for one in outputs if one.same is False and one.reason is None]


def unlike(outputs: Sequence[OutputDiff]) -> list[OutputDiff]:
    """Return the outputs that could not be compared number by number, since their shapes differ."""
    return [one for one in outputs if one.same is False and one.reason is not None]


def percent_of_size(share: float) -> str:
    """Return a share in percent as text, with three significant digits, or two if it is very small or large.

    Example:
        >>> percent_of_size(1.0), percent_of_size(0.01234), percent_of_size(3.14e-7)
        ('100%', '1.23%', '3.1e-5%')
    """
    return f"{share * 100:.3g}%" if 1e-4 <= share < 9.995 else f"{short(share * 100)}%"


def _size(outputs: Sequence[OutputDiff], off: Sequence[OutputDiff]) -> Message:
    """Return the largest difference of the outputs `off`, with their names if there are several outputs."""
    by = max((one.difference or 0.0 for one in off), default=0.0)
    if len(outputs) == 1:
        return (
            Message("paragraphs.size.one", by=percent_of_size(by))
            if math.isfinite(by)
            else Message("paragraphs.size.not_finite")
        )
    names = _names_text([one.name for one in off])
    if math.isfinite(by):
        return Message("paragraphs.size.most", by=percent_of_size(by), names=names)
    return Message("paragraphs.size.not_finite_of", names=names)


def _names_text(outputs: Sequence[str]) -> str:
    """Return names of outputs as text; only the first ones of many."""
    names = joined([f"`{name}`" for name in outputs[:MOST_OUTPUTS_NAMED]], "comma")
    more = len(outputs) - MOST_OUTPUTS_NAMED
    return Message("outputs.more", names=names, count=more) if more > 0 else names


def of_outputs(pairs: Sequence[PairDiff], ends: OutputComparison) -> OfOutputs:
    """Return the sentences about the outputs: those before and after the ones on attentions.

    Args:
        pairs: compared attentions.
        ends: comparison of the outputs.

    Example:
        >>> off = (OutputDiff("logits", False, 1.0, 2e-6),)
        >>> pair = PairDiff("h.0", "h.0", 0, 0, True, None, None, (), 2e-7, 1e-6)
        >>> from sqrtdk.compare.records import FirstModule
        >>> chain = DifferenceChain((Entry(FirstModule("lm_head", "lm_head"), "`lm_head`"),))
        >>> of_outputs([pair, pair], OutputComparison(off, chain=chain)).before
        ['The attentions agree; outputs differ by 100%. The first difference is in `lm_head`.']
    """
    before: list[str] = [_of_reason("paragraphs.outputs.unlike", one) for one in unlike(ends.outputs)]
    after: list[str] = list(ends.more)
    after += [Message("paragraphs.outputs.missing", reason=ends.missing)] if ends.missing else []
    if unjudged := [f"`{one.name}`" for one in ends.outputs if one.same is None and one.reason is None]:
        after.append(Message("paragraphs.outputs.nan", names=joined(unjudged, "comma")))
    after += [
        _of_reason("paragraphs.outputs.unjudged", one)
        for one in ends.outputs
        if one.same is None and one.reason is not None
    ]
    off, reached, chain = differing_outputs(ends.outputs), reached_by(pairs), ends.chain
    steps = [Message(f"outputs.sentence.{name}", **values) for name, values in _steps(chain)]
    if reached and chain.entries and not chain.beside:
        attentions = _attentions(reached, pairs)
        reaches = Message("paragraphs.outputs.reaches", attentions=attentions)
        if off:
            reaches = Message(
                "paragraphs.outputs.reaches_outputs", attentions=attentions, size=_size(ends.outputs, off)
            )
        return OfOutputs([one_paragraph([steps[0], reaches, *steps[1:]]), *before], after, chain=True)
    agree = bool(pairs) and all(pair.same for pair in pairs)
    if not off:
        return OfOutputs(before, after, last=_within(ends.outputs) if agree else ())
    size = _size(ends.outputs, off)
    if agree:
        id = "paragraphs.outputs.agree_one" if len(pairs) == 1 else "paragraphs.outputs.agree"
        return OfOutputs([one_paragraph([Message(id, size=size), *steps]), *before], after, agree=True)
    return OfOutputs(before, [one_paragraph([Message("paragraphs.outputs.differ", size=size), *steps]), *after])


def _within(outputs: Sequence[OutputDiff]) -> list[str]:
    """Return the sentence on how far outputs differ that agree within rounding; [] if not all of them do."""
    if not outputs or not all(one.same for one in outputs):
        return []
    most = max(outputs, key=lambda one: one.difference or 0.0)
    if not most.difference or most.allowed is None:
        return [Message("paragraphs.outputs.equal")] if most.difference == 0.0 else []
    return [Message("paragraphs.outputs.within", size=_size(outputs, [most]), allowed=percent_of_size(most.allowed))]


def _of_reason(id: str, output: OutputDiff) -> Message:
    return Message(id, name=f"`{output.name}`", reason=output.reason or "")


def _attentions(reached: Sequence[PairDiff], pairs: Sequence[PairDiff]) -> Message:
    if is_to_the_end(reached, pairs):
        return Message("paragraphs.outputs.attentions_since", site=site_of_pair(reached[0]))
    sites = site_list([site_of_pair(pair) for pair in reached])
    one = len(reached) == 1
    return Message("paragraphs.outputs.attention_at" if one else "paragraphs.outputs.attentions_at", sites=sites)


def unwritten(pairs: Sequence[PairDiff], a: ModelSide, b: ModelSide) -> list[Message]:
    """Return a sentence on tensors to add to a trace file, so that an unknown difference of q, k or v can be named.

    Args:
        pairs: compared attentions.
        a: side A.
        b: side B.

    Returns:
        One sentence, or [] if no trace file lacks projected values of a vector with an unknown difference.
    """
    unknown = {cause.stage.partition(" ")[0] for pair in pairs for cause in pair.causes if cause.name == UNKNOWN_CAUSE}
    parts = [letter for name, letter in QKV_LETTERS.items() if name in unknown]
    bare = [
        label
        for label, side in (("A", a), ("B", b))
        if side.info.kind == TRACE_KIND
        and any(getattr(call, name).projected is None for call in side.calls for name in QKV_LETTERS if name in unknown)
    ]
    if not bare or not parts:
        return []
    tensors = joined([f"`{letter}.projected`" for letter in parts], "and")
    return [Message("paragraphs.add_projected", sides=joined(bare, "and"), tensors=tensors)]

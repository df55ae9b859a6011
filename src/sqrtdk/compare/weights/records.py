"""What a report holds of weights: which of A is which of B, and what differs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WeightDiff:
    """A weight of A and one of B that belong together.

    Attributes:
        a: name of A's.
        b: name of B's.
        layout: how B's lies, seen from A's: "same", "reshaped" (another shape, the same order), "transposed", "axes"
            (axes in another order), "permuted" (rows in another order), "part" (one is a part of the other). If the
            numbers differ, as weights of its kind lie.
        numbers: "same" up to the last digits; "rounded" (one is the other in `dtype`); "scaled" (B's are A's times
            `factor`); "offset" (plus `factor`); "other".
        difference: root mean square of the difference, as a share of A's size; None if the numbers are the same.
        factor: the factor or the summand; 1 for none.
        dtype: dtype to which one is rounded; "" for none.
        tied: one side has the weight twice, and this is the second time.
        turned: the weight lies in the other convention than the rest of its side: as in A, where others are transposed.
        expected: B's weight in the place of A's, if that is another: layers or names are exchanged; "" for none.
        constant: the number that all entries of B's are, where A's differ; None for none.
        rows_a: of a part, rows of A's: "0-63", or their number if they don't follow one another; "" for all.
        rows_b: the same of B's.
    """

    a: str
    b: str
    layout: str
    numbers: str
    difference: float | None = None
    factor: float = 1.0
    dtype: str = ""
    tied: bool = False
    turned: bool = False
    expected: str = ""
    constant: float | None = None
    rows_a: str = ""
    rows_b: str = ""


@dataclass(frozen=True, slots=True)
class WeightFault:
    """A mistake in weights that should be A's with an adapter or rounded: applied to A's, it gives B's numbers.

    Attributes:
        name: one of the names in docs/en/diff.md: "adapter_zero", "adapter_factor", "rounding_zero_point", ...
        weights: names of A's weights that have it.
        factor: B's share of the update, or B's numbers over the right ones; None for other mistakes.
        other: names of weights whose update or scales these have; empty for other mistakes.
        dtype: dtype to which the numbers were rounded; "" for other mistakes.
        share: what is lost or wrong, as a share of the update's or of the weights' size; None if nothing is.
        codes: what the factor may be: "twice", "scale", "unscaled", "root", "reversed".
    """

    name: str
    weights: tuple[str, ...]
    factor: float | None = None
    other: tuple[str, ...] = ()
    dtype: str = ""
    share: float | None = None
    codes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KnownChange:
    """A change of A's weights that gives B's: an adapter, or a rounding.

    Attributes:
        kind: "LoRA", "DoRA", "IA3", "whole", "product" (an update of low rank that no file tells of); or what the
            weights are rounded to: "int4, groups of 32, zero points", "nf4, groups of 64", "fp8 e4m3, blocks of 128".
        weights: names of A's weights.
        rank: ranks of the updates, each once; empty for others.
        scale: scales of the updates, alpha / r or alpha / sqrt(r), each once; empty for others.
        size: root mean square of the change, as a share of A's numbers.
        costs: for each kind of weight, without the number of its layer, the difference of the outputs when A has the
            change there alone, as a share of their size; the largest first.
        steps: of a rounding, the root mean square of the change in steps of the grid; 0.29 is that of rounding to
            nearest. None for others.
    """

    kind: str
    weights: tuple[str, ...]
    rank: tuple[int, ...] = ()
    scale: tuple[float, ...] = ()
    size: float = 0.0
    costs: tuple[tuple[str, float], ...] = ()
    steps: float | None = None


@dataclass(frozen=True, slots=True)
class KnownChanges:
    """What lies between the weights of both sides and is known; when they are compared, one has the other's numbers.

    Attributes:
        changes: adapters and roundings.
        faults: mistakes in them.
        cost: difference of the outputs by all changes and mistakes together, as a share of their size; None if A can't
            run without them.
        side: "B" if B's weights are A's with the adapter; "A" if it is A that has it, with an adapter's directory.
        coarse: The side whose weights are rounded, "A" or "B".
        undecided: Names of weights of which rounding hides whether they have the adapter.
        changed: The side that has the other's numbers: "A", or "B" where A's are made by its program, of codes.
    """

    changes: tuple[KnownChange, ...] = ()
    faults: tuple[WeightFault, ...] = ()
    cost: float | None = None
    side: str = "B"
    coarse: str = "B"
    undecided: tuple[str, ...] = ()
    changed: str = "A"


@dataclass(frozen=True, slots=True)
class WeightsReport:
    """The weights of both sides, paired by their numbers.

    Attributes:
        alike: number of weights with the same name, shape and numbers on both sides.
        named_alike: at least half of A's names of weights are B's too.
        pairs: all other pairs, in A's order.
        alone_a: names of A's weights without a partner.
        alone_b: names of B's.
        unread_a: names of weights that A's program never reads.
        unread_b: the same of B's.
        known: what lies between the weights and is known; None if nothing is. The other fields are those of A with it.
    """

    alike: int
    named_alike: bool = True
    pairs: tuple[WeightDiff, ...] = ()
    alone_a: tuple[str, ...] = ()
    alone_b: tuple[str, ...] = ()
    unread_a: tuple[str, ...] = ()
    unread_b: tuple[str, ...] = ()
    known: KnownChanges | None = None

"""Where two models begin to differ: the first module whose input agrees and whose output does not.

Both run in float64, where rounding hides nothing that matters. What an attention does otherwise has causes of its own;
whether anything differs behind it is seen where that attention of A returns what B's did.

The same float64 runs tell whether what two attentions do otherwise cancels before it leaves their modules.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from sqrtdk._sites import ROOT
from sqrtdk.compare.entering import UNMEASURED, Blind, exact_of, rows_of
from sqrtdk.compare.modules import Kept, ModuleStep, Place, Returned, align_steps
from sqrtdk.compare.numbers import difference
from sqrtdk.compare.precision import unit
from sqrtdk.compare.records import FirstModule, PairDiff
from sqrtdk.compare.sides import Exact, Side
from sqrtdk.errors import SqrtdkError
from sqrtdk.tracing.tape.stance import Disturbed

_HIDDEN = -1e4  # and below: what a float mask adds to hide a key; which number it is makes no difference
_SHARE = 8.0  # a difference enters where it is at least this part of what it is in the end
Steps = Sequence[tuple[ModuleStep, ModuleStep]]


@dataclass(frozen=True, slots=True)
class Found:
    """Where a difference enters.

    Attributes:
        module: the module.
        behind: what of it is known to agree: a module of A inside it, or "the attention"; "" where nothing is.
        before: the first module of A inside it whose input differs; "" where there is none.
        leaf: it has no modules inside that tell more.
    """

    module: FirstModule
    behind: str = ""
    before: str = ""
    leaf: bool = True

    @property
    def inside(self) -> str:
        """Where, after "the difference enters"."""
        name = f"`{self.module.a}`" if self.module.a else "the model"
        if self.leaf or not (self.behind or self.before):
            return f"in {name}"
        behind = self.behind if self.behind == ATTENTION else f"`{self.behind}`"
        first = behind if self.behind else f"the input of {name}"
        last = f"`{self.before}`" if self.before else f"the output of {name}"
        return f"between {first} and {last}"

    @property
    def since(self) -> str:
        """Where, after "outputs differ"."""
        return f"from `{self.module.a or ROOT}` on" if self.leaf else f"the difference enters {self.inside}"


ATTENTION = "the attention"


@dataclass(frozen=True, slots=True)
class Traced:
    """What was found of the way that a difference takes.

    Attributes:
        found: where it enters outside of the attentions that have causes; None where that is not known, or nowhere.
        follows: everything that differs follows from these attentions.
        beside: it enters apart from what these attentions do otherwise, not before them.
    """

    found: Found | None = None
    follows: bool = False
    beside: bool = False


def follow(a: Side, b: Side, pairs: Sequence[PairDiff], blind: Blind, share: float) -> Traced:
    """Find the first module that differs.

    Args:
        a: A.
        b: B.
        pairs: every pair, judged by what it does to one input.
        blind: rows that see no key on one side.
        share: by how much of its size the output differs in the end.
    """
    exact = [exact_of(side, listen=True) for side in (a, b)]
    if exact[0] is None or exact[1] is None or not all(one.steps for one in exact if one is not None):
        return Traced()
    sites = {pair.site_a: pair.site_b for pair in pairs}
    own = [pair for pair in pairs if pair.same is False and any(cause.name != "input" for cause in pair.causes)]
    own += [pair for pair in pairs if pair.same is False and not pair.causes and pair.follows_from is None]
    agreeing = {pair.site_a for pair in pairs} - {pair.site_a for pair in own}
    level = level_of(exact, share)
    steps = align_steps(exact[0].steps, exact[1].steps, sites)
    found = _first(steps, sites, agreeing, blind, level)
    if found is None:
        return Traced()
    if not any(_related(found.module.a, pair.site_a) for pair in own):
        return Traced(found)
    returned = _returned(own, (a, b), exact)
    if returned is None or a.again is None:
        return Traced()
    a.forwards += 1
    try:
        patched = a.again(True, returned)
    except (SqrtdkError, RuntimeError, TypeError, ValueError, NotImplementedError):
        return Traced()
    if patched.replaced != set(returned):
        return Traced()  # A returns a tensor of another shape, or one that can't be put in
    steps = align_steps(patched.steps, exact[1].steps, sites)
    steps = [pair for pair in steps if not _within(pair[0].place[0], [one.site_a for one in own])]
    found = _first(steps, sites, agreeing, blind, level)
    return Traced(follows=True) if found is None else Traced(found, beside=True)


def level_of(exact: Sequence[Exact | None], share: float) -> tuple[float, float]:
    """Relative rounding of one step, and the most that is taken for rounding.

    Models cast to float32 on their way (`x.float()` in a norm), so that is the dtype that is allowed for.
    """
    units = [max(unit(one.dtype), unit(torch.float32)) for one in exact if one is not None]
    return UNMEASURED * max(units), share / _SHARE if share else math.inf


def _related(path: str, site: str) -> bool:
    """Whether one of two modules is inside the other, or they are one."""
    return _within(path, [site]) or _within(site, [path])


def _within(path: str, sites: Collection[str]) -> bool:
    return any(path == site or not site or path.startswith(f"{site}.") for site in sites)


def _returned(own: Sequence[PairDiff], sides: tuple[Side, Side], exact: Sequence[Exact | None]) -> Returned | None:
    """What the modules of B with the attentions that differ return, by the place of their partners in A.

    None where one of them is the whole model, or was called another number of times than its attention ran.
    """
    ran = [Counter(call.site for call in side.calls) for side in sides]
    called = [Counter(step.place[0] for step in one.steps) for one in exact if one is not None]
    by_place = {step.place: step for one in exact[1:] if one is not None for step in one.steps}
    returned = {}
    for pair in own:
        if any(ran[i][site] != called[i][site] for i, site in enumerate((pair.site_a, pair.site_b))):
            return None
        step = by_place.get((pair.site_b, pair.index_b))
        if step is None or not pair.site_a or not pair.site_b or not step.whole:
            return None
        returned[pair.site_a, pair.index_a] = step.whole
    return returned


def _first(
    steps: Steps, sites: Mapping[str, str], agreeing: Collection[str], blind: Blind, level: tuple[float, float]
) -> Found | None:
    """The first call whose input agrees and whose output does not, in the order in which calls of A end."""
    each, most = level

    def alike(one: Sequence[Kept], other: Sequence[Kept], order: int) -> bool | None:
        allowed = min(each * math.sqrt(order + 1), most)
        gaps = [gap_of(x, y, blind) for x, y in matched(one, other)]
        return None if not gaps else all(gap <= allowed for gap in gaps)

    gave: list[tuple[ModuleStep, bool | None, bool | None]] = []
    for order, (one, other) in enumerate(steps):
        main = 1 if any(_within(site, [one.place[0]]) for site in sites) else len(one.gives)
        takes, gives = alike(one.takes, other.takes, order), alike(one.gives[:main], other.gives, order)
        gave.append((one, takes, gives))
        if takes is not False and gives is False:  # calls inside of it have ended before it
            module = FirstModule(one.place[0], other.place[0])
            inside = [step for step in gave if step[0].parent == one.number]
            return _inside(module, inside, one.place[0] in agreeing)
    return None


def _inside(module: FirstModule, inside: Sequence[tuple[ModuleStep, bool | None, bool | None]], attends: bool) -> Found:
    """Where in a module: behind the last call of it that agrees, before the first whose input does not."""
    if not inside:
        return Found(module)
    behind = before = ""
    for step, takes, gives in inside:
        if takes is False:
            before = step.place[0]
            break
        if gives:
            behind = step.place[0]
    if attends:
        behind = ATTENTION
    return Found(module, behind, before, leaf=False)


def matched(one: Sequence[Kept], other: Sequence[Kept]) -> list[tuple[Kept, Kept]]:
    """Tensors of one kind and shape, in order; those that only one side has are left out."""
    left = list(other)
    pairs = []
    for x in one:
        kind = x.values.is_floating_point()
        y = next((y for y in left if y.shape == x.shape and y.values.is_floating_point() == kind), None)
        if y is not None:
            left.remove(y)
            pairs.append((x, y))
    return pairs


def gap_of(x: Kept, y: Kept, blind: Blind) -> float:
    """Root mean square of the difference, as a share of the size of A's."""
    stride = math.lcm(x.stride, y.stride)
    one, other = x.values[:: stride // x.stride], y.values[:: stride // y.stride]
    if not one.is_floating_point():
        return 0.0 if torch.equal(one, other) else math.inf
    if torch.equal(one, other):
        return 0.0
    one, other = one.double(), other.double()
    rows = rows_of(x.shape, blind)
    if rows is not None:
        counted = rows.reshape(-1)[::stride]
        one, other = one[counted], other[counted]
    one, other = one.clamp_min(_HIDDEN), other.clamp_min(_HIDDEN)
    off = difference(one, other)
    size = float(torch.where(torch.isfinite(one), one, 0.0).square().mean().sqrt()) if one.numel() else 0.0
    gap = float(off.square().mean().sqrt()) if off.numel() else 0.0
    return gap / size if size else gap and math.inf


# -- what cancels ------------------------------------------------------------------------------------------------------


def leaves_alike(a: Side, b: Side, pairs: Sequence[tuple[Place, Place]], blind: Blind) -> list[bool]:
    """Whether modules get the same and give the same, whatever their attentions do on the way.

    `(weights @ v) * sigmoid(lse - sink)` is attention with a sink: other weights, and the same output. A module that
    gives nothing but zeros, or fewer rows than it gets, as one that returns the last token, tells nothing. Nor does one
    whose output does not change with its attention, as `x + proj(heads)` where `proj` begins as zero.

    Args:
        a: A.
        b: B.
        pairs: places of modules of A and of B.
        blind: rows that see no key on one side.
    """
    exact = [exact_of(side, listen=True) for side in (a, b)]
    if exact[0] is None or exact[1] is None:
        return [False] * len(pairs)
    steps = [{step.place: step for step in one.steps} for one in exact if one is not None]
    allowed = level_of(exact, 0.0)[0]
    alike = []
    for place_a, place_b in pairs:
        one, other = steps[0].get(place_a), steps[1].get(place_b)
        if one is None or other is None or not one.gives or not _rows(one.gives[0]) >= _rows_taken(one):
            alike.append(False)
            continue
        takes, gives = matched(one.takes, other.takes), matched(one.gives[:1], other.gives)
        same = [bool(pairs) and all(gap_of(x, y, blind) <= allowed for x, y in pairs) for pairs in (takes, gives)]
        alike.append(all(same) and bool(one.gives[0].values.any()) and _reacts(a, one, blind, allowed))
    return alike


def _reacts(a: Side, step: ModuleStep, blind: Blind, allowed: float) -> bool:
    """Whether what a module gives changes where its attention gives something else."""
    call = next((call for call in a.calls if (call.site, call.index) == step.place), None)
    if call is None or call.output is None or a.again is None:
        return False
    a.forwards += 1
    by = torch.linspace(-0.5, 0.5, call.output.numel()).to(call.output).view_as(call.output)
    other = Disturbed(call.output, call.output * by)
    try:
        with other:
            run = a.again(True, None)
    except (SqrtdkError, RuntimeError, TypeError, ValueError, NotImplementedError):
        return False
    gives = [own.gives[:1] for own in run.steps if own.place == step.place]
    return other.done and any(gap_of(x, y, blind) > allowed for own in gives for x, y in matched(step.gives[:1], own))


def _rows(kept: Kept) -> int:
    return math.prod(kept.shape[:-1])


def _rows_taken(step: ModuleStep) -> int:
    """Rows of its main argument; of ids, one each."""
    main = step.takes[0] if step.takes else None
    return 0 if main is None else _rows(main) if main.values.is_floating_point() else math.prod(main.shape)

"""The table of mistakes, one row for each, and how look-alikes are distinguished.

d = head_dim, h = heads, r = effective scale * sqrt(d). Several causes can give the same scale, so evidence decides
before value: zero padding that the product saw, a declared length factor, a pattern over the layers, and the factors
along the lineage (a scale applied twice is two factors of d^-1/2, muP's 1/d is one).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from sqrtdk.audit.tolerance import inverse_root, is_close
from sqrtdk.audit.written import written_root
from sqrtdk.messages import Message, joined
from sqrtdk.tracing.records import AttentionCall

PAD_MULTIPLES = (8, 16, 32, 64, 128)  # head sizes that kernels pad to
UNKNOWN_MISTAKE = "unknown"
OTHER_SIZES = ("model_dim", "head_count", "derived_head", "padded_head")  # the root of another size than d


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """The name and values of one mistake; the catalogue has its texts."""

    name: str  # as in records, reports and docs/en/check.md
    table: tuple[str, str, str] | None = None  # row of docs/en/check.md: scale, ratio to the textbook, cause
    # The scales that it can give a call. Empty if it is recognised by other evidence than its value.
    values: Callable[[AttentionCall], tuple[float, ...]] = lambda call: ()
    rank: int = 0  # among mistakes that give the same scale, the lowest rank is named
    # Whether no gain, norm or rule gives its value: `heads ** -0.5` is always a mistake, 1 is a rule after a norm.
    unmistakable: bool = False
    words: str = ""  # which of its words the factors of a call single out; see `told_of`
    dims: int = 0  # d of the calls that made it; 0 if they differ
    now: str = ""  # the code that makes it, as "/ math.sqrt(self.dim)"; "" if it was not found
    right: str = ""  # that code with d in place of the other size

    @property
    def happened(self) -> str:
        """What was done, a clause for a finding."""
        return Message(f"rules.mistakes.{self.name}{self.words}.happened")

    @property
    def fix(self) -> str:
        """What to do, one sentence."""
        id = f"rules.mistakes.{self.name}{self.words}.fix"
        if self.now:
            return Message("rules.mistakes.written", now=self.now, right=self.right, d=self.dims)
        if self.dims and self.name in OTHER_SIZES:
            return Message("rules.mistakes.other_size", d=self.dims)
        return Message(id)

    @property
    def fix_declared(self) -> str:
        """What to do if the run contradicts a declaration."""
        return self.fix if self.known else Message("rules.mistakes.unknown.fix_declared")

    @property
    def known(self) -> bool:
        """Whether this is a mistake, rather than the lack of an explanation."""
        return self.name != UNKNOWN_MISTAKE


def _padded_sizes(call: AttentionCall) -> tuple[int, ...]:
    d = call.head_dim
    # Up to the next multiple, or to the next power of two.
    sizes = {-(-d // multiple) * multiple for multiple in PAD_MULTIPLES} | {1 << max(d - 1, 0).bit_length()}
    return tuple(sorted(size for size in sizes if size > d))


def _model_dims(call: AttentionCall) -> tuple[int, ...]:
    dims = [call.heads * call.head_dim] + ([call.model_dim] if call.model_dim else [])
    return tuple(dict.fromkeys(dim for dim in dims if dim != call.head_dim))


def _derived_sizes(call: AttentionCall) -> tuple[float, ...]:
    # Qwen3-0.6B: 1024 / 16 heads is 64, and its head_dim is 128.
    if not call.model_dim or not call.heads:
        return ()
    sizes = (call.model_dim / call.heads, float(call.model_dim // call.heads))
    return tuple(dict.fromkeys(size for size in sizes if size not in (0.0, call.head_dim)))


MISTAKES: dict[str, Mistake] = {
    mistake.name: mistake
    for mistake in (
        Mistake(
            name="missing",
            table=("1", "sqrt(d)", "no scale at all"),
            values=lambda call: (1.0,),
            rank=1,
        ),
        Mistake(
            name="twice",
            table=("1/d", "1/sqrt(d)", "q was scaled, and the fused call scaled again"),
            values=lambda call: (inverse_root(call.head_dim) ** 2,),
            rank=5,
        ),
        Mistake(
            name="inverted",
            table=("sqrt(d)", "d", "multiplied instead of divided"),
            values=lambda call: (math.sqrt(call.head_dim),),
            rank=2,
            unmistakable=True,
        ),
        Mistake(
            name="model_dim",
            table=("1/sqrt(h d)", "1/sqrt(h)", "the root of the model's width was taken"),
            values=lambda call: tuple(map(inverse_root, _model_dims(call))),
            rank=3,
            unmistakable=True,
        ),
        Mistake(
            name="head_count",
            table=("1/sqrt(h)", "sqrt(d/h)", "the root of the number of heads was taken"),
            values=lambda call: tuple(map(inverse_root, {call.heads, call.kv_heads} - {0, 1})),
            rank=4,
            unmistakable=True,
        ),
        Mistake(
            name="derived_head",
            table=(
                "1/sqrt(w/h)",
                "sqrt(d h/w)",
                "the root of the model's width w divided by the heads was taken, but the head has a size of its own",
            ),
            values=lambda call: tuple(map(inverse_root, _derived_sizes(call))),
            rank=6,
            unmistakable=True,
        ),
        Mistake(
            name="padded_head",
            table=("1/sqrt(d_pad)", "sqrt(d/d_pad)", "the head was padded, and the padded size used"),
            values=lambda call: tuple(map(inverse_root, _padded_sizes(call))),
            rank=7,
            unmistakable=True,
        ),
        Mistake(
            name="length_factor",
            table=(
                "declared / mscale^2",
                "1/mscale^2 of the declared",
                "a declared factor for long contexts (YaRN) was dropped",
            ),
        ),
        Mistake(
            name="layer_index",
            table=("1/((l+1) sqrt(d))", "1/(l+1)", "a factor of the layer's number, or its loss where it is declared"),
        ),
        Mistake(
            name="cosine",
            table=("1/sqrt(d)", "1", "q and k have unit length, and were divided all the same"),
        ),
        Mistake(
            name=UNKNOWN_MISTAKE,
        ),
    )
}

_BY_RANK = sorted(MISTAKES.values(), key=lambda mistake: mistake.rank)


def root_factors(call: AttentionCall) -> int:
    """Return how many factors of a call's scale equal 1/sqrt(head_dim) within 1%; 2 if it was applied twice."""
    expected = inverse_root(call.head_dim)
    return sum(factor.value is not None and is_close(factor.value, expected) for factor in call.scale.factors)


def told_of(name: str, calls: Iterable[AttentionCall]) -> Mistake:
    """Return the mistake of this name, with a wording that holds for all calls that made it.

    1/head_dim is one number with two causes: (q * d**-0.5) @ k.mT * d**-0.5 applies the scale twice, and q @ k.mT / d
    divides by d once. The factors tell them apart; if they were not read or the calls differ, the words name both.

    Args:
        name: A key of `MISTAKES`.
        calls: The calls that made the mistake.
    """
    calls = [*calls]
    dims = {call.head_dim for call in calls}
    one = replace(MISTAKES[name], dims=dims.pop() if len(dims) == 1 else 0)
    # of several factors the one with a root on its line may be the right one
    if name in OTHER_SIZES and one.dims and all(len(call.scale.factors) == 1 for call in calls):
        found = {written_root(factor.at, one.dims) for call in calls for factor in call.scale.factors}
        codes = found - {None}
        if len(codes) == 1 and (code := codes.pop()) is not None:
            return replace(one, now=code[0], right=code[1])
    if name != "twice":
        return one
    kinds = {_factors_of_twice(call) for call in calls}
    return replace(one, words=kinds.pop() if len(kinds) == 1 else "")


def _factors_of_twice(call: AttentionCall) -> str:
    if root_factors(call) >= 2:
        return ".two_factors"
    whole = inverse_root(call.head_dim) ** 2
    is_one = any(factor.value is not None and is_close(factor.value, whole) for factor in call.scale.factors)
    return ".one_factor" if is_one else ""


def name_mistake(
    call: AttentionCall, effective: float, length: float = 1.0, layered: str | None = None
) -> tuple[str, str | None]:
    """Return the mistake that explains an effective scale, and how it was told from others with the same value.

    Args:
        call: The attention, whose sizes and factors are the evidence.
        effective: The scale that ran.
        length: A declared length multiplier (YaRN's mscale squared), which the scale may contain as well.
        layered: A message that says how the scale follows the layer number, if it does.

    Returns:
        The name, a key of `MISTAKES`, and the reason for the choice if several mistakes give this value, else None.
    """
    if layered:
        return "layer_index", layered
    targets = (effective,) if length in (0.0, 1.0) else (effective, effective / length)
    padded = call.padded_head_dim
    if padded > call.head_dim and any(is_close(target, inverse_root(padded)) for target in targets):
        return "padded_head", Message("rules.alike.padded", dims=call.head_dim, padded=padded)
    alike = [
        mistake.name
        for mistake in _BY_RANK
        if any(is_close(target, value) for target in targets for value in mistake.values(call))
    ]
    if "twice" in alike:
        roots = root_factors(call)
        if roots >= 2:
            return "twice", Message("rules.alike.factors", number=roots, dims=call.head_dim)
        if alike[0] == "twice":
            return "twice", Message("rules.alike.one_factor")
    if not alike:
        return UNKNOWN_MISTAKE, None
    # 16 is a size that kernels take: nobody pads it, unless the product shows that
    others = [name for name in alike[1:] if name != "padded_head" or call.head_dim & (call.head_dim - 1)]
    return alike[0], Message("rules.alike.by_value", others=joined(others, "comma")) if others else None

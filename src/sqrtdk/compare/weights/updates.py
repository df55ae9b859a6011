"""Holds the weights of a side with an adapter against those that the adapter should give, and names what went wrong.

With W the base's weight, D = s B A the update and B's weight V, the share of the update that V has is

    c = <V - W, D> / <D, D>

V is right if c is 1 and V = W + D but for the rounding of V's numbers. Any other c that gives V is a mistake with a
number: 0 was not loaded, 2 was merged twice, s had its scale twice, sqrt(r) took `use_rslora` for what it is not. What
no c gives is tried transposed, and as the update of every other weight of that shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sqrtdk.compare.rounding.precision import COARSER_DTYPES, rounding_unit, stored_in
from sqrtdk.compare.weights.pairing import NUMBER_OF_LAYER
from sqrtdk.models.adapters import Adapter, Update

_SAME_FACTOR = 1e-2  # relative: c of a right update is off by less, however coarse the dtype
_ROUNDINGS_ALLOWED = 4.0  # of the weight and of the update, each in the dtype in which it was merged
_LOST = 0.1  # share of the update that may go in rounding without a word
_MOST_FACTOR = 1e4
_DEVIATIONS = 4.0
_DENSE = 0.9  # share of the entries that an adapter moves
_EXACT_SIDE = 2**8


@dataclass(frozen=True, slots=True, eq=False)
class FoundUpdate:
    """What a weight of the adapted side has of its update.

    Attributes:
        fault: "" if it is right; None if nothing that was tried gives its numbers.
        factor: c.
        other: name of the weight whose update it has.
        dtype: dtype to which its numbers are rounded.
        share: what rounding took, as a share of the update.
    """

    fault: str | None = ""
    factor: float = 1.0
    other: str = ""
    dtype: str = ""
    share: float = 0.0


def found_update(name: str, base: Tensor, got: Tensor, adapter: Adapter) -> FoundUpdate:
    """Return what a weight has of an adapter's update.

    Args:
        name: Name of the base's weight.
        base: Its numbers.
        got: The numbers of the adapted side.
        adapter: The adapter; the name may be none of its updates, if an update lies where it does not belong.

    Example:
        >>> update = Update("LoRA", torch.eye(2), torch.eye(2), scale=0.5)
        >>> weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> found = found_update("q", weight, weight + torch.eye(2), Adapter("a", {"q": update}))
        >>> found.fault, found.factor
        ('factor', 2.0)
    """
    update = adapter.updates.get(name)
    base, got = base.double().cpu(), got.double().cpu()
    right = None if update is None else update.applied(base.float()).double().cpu()
    dtype = _stored(got, base, right)
    if update is not None and right is not None:
        if float((right - base).norm()) == 0.0:
            return FoundUpdate("zero" if _alike(base, got, base, dtype) else None)
        found = _of_own(update, base, right, got, dtype)
        if found is not None:
            return _with_loss(found, right, got, base, dtype)
        if update.up is not None and base.shape[0] == base.shape[1]:
            turned = base + update.scale * update.product().mT.double().cpu()
            if _alike(turned, got, base, dtype):
                return FoundUpdate("transposed")
    elif _alike(base, got, base, dtype):
        return FoundUpdate()
    for other, its in _others(name, base, adapter):
        if _alike(its.applied(base.float()).double().cpu(), got, base, dtype):
            return FoundUpdate("elsewhere", other=other)
    return FoundUpdate(None)


def _of_own(update: Update, base: Tensor, right: Tensor, got: Tensor, dtype: torch.dtype | None) -> FoundUpdate | None:
    moved = right - base
    c = float(((got - base) * moved).sum() / moved.square().sum())
    # rounding that is independent of the update moves c by its own size over that of the update
    noise = 0.0 if dtype is None else rounding_unit(dtype) * float(right.norm() / moved.norm())
    slack = max(_SAME_FACTOR, _DEVIATIONS * noise / math.sqrt(got.numel()))
    if abs(c - 1) < slack:
        return FoundUpdate() if _alike(right, got, base, dtype) else None
    if update.magnitude is None and update.kind != "IA3":
        c = 0.0 if abs(c) < slack else c
        if abs(c) < _MOST_FACTOR and _alike(base + c * moved, got, base, dtype):
            return FoundUpdate("factor", factor=c)
        return None
    # DoRA and IA3 are no sums: each mistake is applied as it would have been made
    again = update.applied(right.float()).double().cpu()
    tries: list[tuple[Tensor, FoundUpdate]] = [(base, FoundUpdate("factor", factor=0.0))]
    tries.append((again, FoundUpdate("factor", factor=2.0)))
    if update.magnitude is not None:
        bare = replace(update, magnitude=None).applied(base.float()).double().cpu()
        tries.append((bare, FoundUpdate("magnitude")))
        for s in _wrong_scales(update):
            tries.append(
                (update.applied(base.float(), s).double().cpu(), FoundUpdate("factor", factor=s / update.scale))
            )
    return next((found for tried, found in tries if _alike(tried, got, base, dtype)), None)


def _wrong_scales(update: Update) -> Iterator[float]:
    s, r = update.scale, max(1, update.rank)
    yield from (s * s, 1.0, s * math.sqrt(r), s / math.sqrt(r))


def codes_of(factor: float, update: Update) -> tuple[str, ...]:
    """Return what a share of the update other than 1 may come from, by the numbers of the update.

    Example:
        >>> codes_of(2.0, Update("LoRA", torch.ones(4, 8), torch.ones(8, 4), scale=2.0, alpha=8.0))
        ('twice', 'scale', 'root')
    """
    s, r = update.scale, max(1, update.rank)
    known: dict[str, Callable[[], float]] = {
        "none": lambda: 0.0, "twice": lambda: 2.0, "scale": lambda: s, "unscaled": lambda: 1 / s,
        "root": lambda: math.sqrt(r), "no_root": lambda: 1 / math.sqrt(r), "reversed": lambda: -1.0,
    }  # fmt: skip
    if update.up is None:
        known = {code: known[code] for code in ("none", "twice", "reversed")}
    return tuple(
        code
        for code, value in known.items()
        if (expected := value()) != 1.0 and abs(factor - expected) <= _SAME_FACTOR * max(abs(expected), _SAME_FACTOR)
    )


def _with_loss(found: FoundUpdate, right: Tensor, got: Tensor, base: Tensor, dtype: torch.dtype | None) -> FoundUpdate:
    """Return what was found, with what rounding took of the update; a fault if it was much, or finer numbers went."""
    moved = float((right - base).norm())
    if dtype is None or found.fault or not moved:
        return found
    share = float((got - right).norm()) / moved
    coarser = stored_in(base.float(), torch.float32) is None
    fault = "dtype" if coarser or share > _LOST else ""
    return replace(found, fault=fault, dtype=str(dtype).removeprefix("torch."), share=share)


def _stored(got: Tensor, base: Tensor, right: Tensor | None) -> torch.dtype | None:
    """Return the coarser dtype that holds all of B's numbers, unless it holds the right ones as well."""
    dtype = stored_in(got.float(), torch.float32)
    if right is not None and dtype is not None and torch.equal(right.to(dtype).double(), right):
        return None
    return dtype


def _alike(expected: Tensor, got: Tensor, base: Tensor, dtype: torch.dtype | None) -> bool:
    """Return whether numbers are those expected, but for the rounding of the base, the update and their sum."""
    if expected.shape != got.shape:
        return False
    sizes = base.abs() + (expected - base).abs()
    # sums of r products lie beside the rounding of a weight
    allowed = _ROUNDINGS_ALLOWED * rounding_unit(torch.float32) * torch.maximum(sizes, sizes.amax())
    if dtype is not None:
        allowed = allowed + _ROUNDINGS_ALLOWED / 2 * rounding_unit(dtype) * sizes
    if bool(((got - expected).abs() > allowed).any()):
        return False
    # rounding is unbiased: a small update that is missing leaves more than all of it
    noise = math.sqrt(2.0) * (rounding_unit(dtype) if dtype in COARSER_DTYPES else 0.0) * float(sizes.norm())
    return float((got - expected).norm()) <= noise + float(allowed.amax()) * math.sqrt(got.numel())


def _others(name: str, base: Tensor, adapter: Adapter) -> Iterator[tuple[str, Update]]:
    """Yield the updates of other weights that fit this one, those of its own kind first."""
    rows, columns = base.shape if base.dim() == 2 else (0, 0)
    fitting: Mapping[str, Update] = {
        other: its
        for other, its in adapter.updates.items()
        if other != name and its.up is not None
        and (its.down.shape[1], its.up.shape[0]) == ((rows, columns) if its.turned else (columns, rows))
    }  # fmt: skip
    role = role_of(name)
    yield from sorted(fitting.items(), key=lambda item: role_of(item[0]) != role)


def role_of(name: str) -> str:
    """Return a name without the number of its layer: "layers.#.q_proj.weight"."""
    return NUMBER_OF_LAYER.sub("#", name)


def rank_of(base: Tensor, got: Tensor) -> int | None:
    """Return the rank of the difference of two matrices if it is one of a merged adapter: dense, and of low rank.

    None for rank 1, which a constant or one row has too, for a rank above a quarter of the smaller side, and where a
    number is not finite.
    """
    base, got = base.detach(), got.detach()
    if base.dim() != 2 or not 2**6 <= base.numel() <= 2**26:
        return None
    moved = (got.float() - base.float()).cpu()
    if not bool(moved.isfinite().all()) or float((moved != 0).float().mean()) < _DENSE:
        return None
    most = min(base.shape) // 4
    size = float(torch.maximum(base.float().abs(), got.float().abs().to(base.device)).square().mean().sqrt())
    unit = rounding_unit(stored_in(got.float(), torch.float32) or torch.float32)
    noise = _ROUNDINGS_ALLOWED**2 * unit * size * sum(math.sqrt(side) for side in base.shape)
    if min(base.shape) <= _EXACT_SIDE:
        values = torch.linalg.svdvals(moved)
    else:
        generator = torch.random.get_rng_state()
        values = torch.svd_lowrank(moved, q=min(most, _EXACT_SIDE) + 1)[1]
        torch.random.set_rng_state(generator)
    rank = int((values > noise).sum())
    # the singular values of rounding are of one size, far below those of the update
    return rank if 2 <= rank <= most and values[rank - 1] > _ROUNDINGS_ALLOWED * values[rank] else None

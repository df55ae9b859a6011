"""Where the runs of several ranks part from that of one process: the first module, and what it does otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sqrtdk.laws.processes.changes import forward_changes, position_change
from sqrtdk.laws.processes.formula import RanksChange, fitting_changes, ranks_formula
from sqrtdk.laws.processes.runs import RunRecord
from sqrtdk.laws.processes.shards import (
    ShardLayout,
    TokenPlaces,
    fitting,
    on_ranks,
    same_within_rounding,
    shard_layouts,
    token_orders,
)
from sqrtdk.laws.subject import NotAsked
from sqrtdk.messages import Message
from sqrtdk.modules.calls import CallPlace, first_apart
from sqrtdk.tracing.tensors import CallTensors

BAR = 2.0**10 * torch.finfo(torch.float32).eps  # of an attention's output, as `sqrtdk.laws.moved` derives it
Parts = Sequence[Tensor | None]


class NotedCall(NamedTuple):
    """What a module took and gave in one process, and the parts of the same on every rank."""

    place: CallPlace
    takes: Tensor | None
    gives: Tensor | None
    taken: Parts
    given: Parts


@dataclass(slots=True, eq=False)
class RunsBeside:
    """A run of one process beside that of the ranks, for the same inputs.

    Attributes:
        alone: The run of one process.
        ranks: The runs of all ranks.
        places: Where each rank's tokens stand, if the inputs tell; else it is learned from the modules that agree.
        tokens: Number of tokens L.
    """

    alone: RunRecord
    ranks: Sequence[RunRecord]
    places: TokenPlaces | None
    tokens: int

    def outputs(self) -> dict[str, ShardLayout | None]:
        """Return by output how the parts of the ranks lie in it, or None for an output that differs.

        A number that is another on each rank, such as the loss of its tokens, is left out: what it should be on a rank
        is not known.

        Raises:
            NotAsked: No output of the ranks has the shape of a part, or each is a number of a rank's own.
        """
        found: dict[str, ShardLayout | None] = {}
        shapes, own = "", None
        for name, whole in self.alone["outputs"].items():
            parts = [run["outputs"].get(name) for run in self.ranks]
            held = self._held(parts, whole)
            if held is None:
                shapes = shapes or ", ".join(str(tuple(part.shape)) for part in parts if part is not None)
                continue
            layout = fitting(held, whole, self.places, self.tokens)
            if layout is None and _is_own_number(held):
                own = own or name
                continue
            found[name] = layout
        if not found and own is not None:
            raise NotAsked(Message("laws.ranks.own_number", name=own))
        if not found:
            wholes = ", ".join(str(tuple(whole.shape)) for whole in self.alone["outputs"].values())
            raise NotAsked(Message("laws.ranks.outputs_no_parts", shapes=shapes or "-", whole=wholes))
        return found

    def numbers(self) -> list[str]:
        """Return the names of the outputs that are one number."""
        return [name for name, whole in self.alone["outputs"].items() if not whole.dim()]

    def _held(self, parts: Parts, whole: Tensor) -> Parts | None:
        """Return the parts that can lie in the whole; of a pipeline only the last stage has them. None if none can."""
        for held in (parts, [part if part is not None and part.shape == whole.shape else None for part in parts]):
            if next(self._layouts(held, whole), None) is not None:
                return held
        return None

    def _layouts(self, parts: Parts, whole: Tensor) -> Iterator[ShardLayout]:
        shapes = [None if part is None else tuple(part.shape) for part in parts]
        return shard_layouts(shapes, tuple(whole.shape), self.places, self.tokens)

    def calls(self) -> list[NotedCall]:
        """Return the calls of modules that ran alone and on some rank, in the order in which they end."""
        by_rank: list[dict[CallPlace, tuple[Tensor | None, Tensor | None]]] = []
        for run in self.ranks:
            calls: dict[CallPlace, tuple[Tensor | None, Tensor | None]] = {}
            for path, index, takes, gives in run["calls"]:
                calls[path, index] = takes, gives
            by_rank.append(calls)
        found = []
        for path, index, takes, gives in self.alone["calls"]:
            both = [calls.get((path, index), (None, None)) for calls in by_rank]
            if any(part is not None for _, part in both):
                found.append(
                    NotedCall((path, index), takes, gives, [part for part, _ in both], [part for _, part in both])
                )
        return found

    def first(self) -> NotedCall | None:
        """Return the first call whose inputs agree and whose outputs differ; None if no module shows it."""
        calls = self.calls()
        differ = [call for call in calls if self._apart(call.gives, call.given)]
        inner = first_apart(differ, lambda call: not self._apart(call.takes, call.taken), lambda _: True)
        return inner if inner is not None else next(iter(differ), None)

    def _apart(self, whole: Tensor | None, parts: Parts) -> bool:
        """Return whether parts that can lie in the whole have other numbers."""
        if whole is None or all(part is None for part in parts):
            return False
        held = self._held(parts, whole)
        if held is None:
            return False
        layout = fitting(held, whole, self.places, self.tokens, sums=True)
        if layout is not None and layout.places is not None and self.places is None:
            self.places = layout.places  # the model cuts the sequence by itself
        return layout is None

    # -- names ---------------------------------------------------------------------------------------------------------

    def hypotheses(self) -> list[TokenPlaces]:
        """Return where tokens may stand: as the inputs or modules tell, or in every order."""
        if self.places is not None or not self.tokens:
            return [] if self.places is None else [self.places]
        count = len(self.ranks)
        if self.tokens % count:
            return []
        return [on_ranks(order, range(count)) for order in token_orders(self.tokens, [self.tokens // count] * count)]

    def name_of_rows(self, call: NotedCall) -> RanksChange | None:
        """Return the change if the rows of a module are those of other places: counted from 0, or in another order."""
        whole = call.gives
        if whole is None or whole.dim() < 2:
            return None
        for places in self.hypotheses():
            sizes = [len(one) for one in places.pieces()]
            piece_of_rank = [
                next(n for n, p in enumerate(places.pieces()) if torch.equal(p, q)) for q in places.of_ranks
            ]
            zero = TokenPlaces("zero", tuple(torch.arange(len(one)) for one in places.of_ranks), places.total)
            others = [("positions", zero)]
            others += [("order", on_ranks(order, piece_of_rank)) for order in token_orders(places.total, sizes)]
            for name, other in others:
                if not _same_places(other, places) and self._lies(call, whole, other):
                    return RanksChange(name, whole)
        return None

    def name_of_scale(self, call: NotedCall) -> RanksChange | None:
        """Return the change if a module gives a multiple of what it should: N times, or one Nth."""
        if call.gives is None or not call.gives.is_floating_point():
            return None
        count = len(self.ranks)
        for factor, text in ((float(count), str(count)), (1.0 / count, f"1/{count}")):
            if fitting(call.given, call.gives * factor, self.places, self.tokens) is not None:
                return RanksChange("scale", call.gives, (("factor", text),))
        return None

    def _lies(self, call: NotedCall, whole: Tensor, places: TokenPlaces) -> bool:
        axis = next((axis for axis in range(whole.dim() - 1) if whole.shape[axis] == places.total), None)
        held = [(rank, part) for rank, part in enumerate(call.given) if part is not None]
        if axis is None or any(part.dim() != whole.dim() for _, part in held):
            return False
        cut = tuple({axis: one} for one in places.of_ranks)
        expected = [ShardLayout(cut).part(whole, rank) for rank, _ in held]
        return all(
            one is not None and same_within_rounding(one, part) for one, (_, part) in zip(expected, held, strict=True)
        )

    def names_of_attention(self, call: CallTensors, shards: Any) -> list[RanksChange]:
        """Return the changes that give what the ranks have of an attention's output; empty if none does.

        Args:
            call: The attention of one process.
            shards: Called with places; returns the same attention run alone on the tokens of each piece and on all
                tokens in the order in which the ranks hold them, or None.
        """
        formula = ranks_formula(call)
        if formula is None or formula.logits.shape[-1] != formula.logits.shape[-2]:
            return []
        if not torch.allclose(formula.output(), call.output.double(), atol=float(call.output.abs().max()) * BAR):
            return []  # the formula that was read is not that of the run
        right = formula.output()
        for output in self._outputs_of(call):
            if fitting_changes(iter([RanksChange("none", right)]), output, BAR):
                return []  # the attention gives what it should; the fault is behind it
            for places in self.hypotheses():
                found = fitting_changes(forward_changes(formula, places), output, BAR)
                if not found and (parts := shards(places)) is not None:
                    pieces, stored = parts
                    changes = [position_change(call, pieces, places), stored_change(call, stored, places)]
                    found = fitting_changes((change for change in changes if change is not None), output, BAR)
                if found:
                    return found
        return []

    def _outputs_of(self, call: CallTensors) -> Iterator[Tensor]:
        """Yield what the ranks have of the output (B, H, L, Ev) of an attention, in each way to put it together.

        Some module takes it or gives it: the projection behind the attention takes (B, L, H Ev).
        """
        for noted in self.calls():
            for whole, parts in ((noted.takes, noted.taken), (noted.gives, noted.given)):
                back = None if whole is None else _carries(whole, call.output)
                if back is None or whole is None:
                    continue
                held = self._held(parts, whole)
                for layout in [] if held is None else self._layouts(held, whole):
                    yield back(layout.whole(held or parts, tuple(whole.shape)))
                return


def _is_own_number(parts: Parts) -> bool:
    """Return whether an output is one number, and another on some rank."""
    held = [part for part in parts if part is not None]
    return not held[0].dim() and any(not same_within_rounding(held[0], part) for part in held)


def _same_places(one: TokenPlaces, other: TokenPlaces) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.of_ranks, other.of_ranks, strict=True))


def _carries(tensor: Tensor, output: Tensor) -> Any:
    """Return what turns a tensor into the attention's output (B, H, L, Ev), if it holds its numbers; else None."""
    batch, heads, length, width = output.shape
    ways = {
        (batch, heads, length, width): (lambda x: x),
        (batch, length, heads, width): (lambda x: x.transpose(1, 2)),
        (batch, length, heads * width): (lambda x: x.unflatten(-1, (heads, width)).transpose(1, 2)),
        (batch * length, heads * width): (lambda x: x.view(batch, length, heads, width).transpose(1, 2)),
    }
    way = ways.get(tuple(tensor.shape))
    if way is None or not tensor.is_floating_point():
        return None
    return way if same_within_rounding(output.to(tensor.dtype), way(tensor).contiguous()) else None


def stored_change(call: CallTensors, stored: CallTensors | None, places: TokenPlaces) -> RanksChange | None:
    """Return the change that tokens have the positions of the order in which the ranks hold them; None if unknown.

    Args:
        call: The attention of the whole sequence.
        stored: The same attention, run alone on the tokens in that order.
        places: Where the tokens of each rank stand.
    """
    order = torch.cat(places.pieces())
    if stored is None or sorted(order.tolist()) != list(range(places.total)):
        return None
    back = order.argsort()
    query, key = (getattr(stored, name).values[:, :, back] for name in ("query", "key"))
    formula = ranks_formula(call, query=query, key=key)
    return None if formula is None else RanksChange("order", formula.output())


def inside(site: str, calls: Mapping[tuple[str, int], CallTensors]) -> CallTensors | None:
    """Return the first attention in a module, itself included."""
    for (path, _), call in calls.items():
        if not site or path == site or path.startswith(f"{site}.") or site.startswith(f"{path}."):
            return call
    return None

"""What several ranks may do otherwise in the backward pass of an attention, tried on one process.

With p the weights, dp = do v^T and D = rowsum(do o), one process has dz = p (dp - D), dk = dz^T q, dv = p^T do. Let
c(r, s) be the part of dk and dv at the keys of rank s that the rows of rank r make; the right gradient there is
sum_r c(r, s). Faults that people make:

    own rows alone          c(s, s): a collective without a backward pass, or parts that never leave their rank
    not sent home           sum_r c(s, r): parts are added on the rank that made them, to keys of its own
    wrong rank              sum_r c(r, s + n): what goes round the ring stops n ranks from home
    averaged, added twice   1/N or N of the sum
    lse without gradient    D of each block, rowsum(do o_s), in place of that of the row
    lse of the block        p of each block from its own lse, in place of that of the row
    own keys alone          dq of the keys of the rank; or dq, dk and dv of its own block

A name is given if the backward pass of one process, changed so at its attentions, gives the ranks' gradients of all
parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from sqrtdk.laws.backward.handles import Handle, Reached, key_of
from sqrtdk.laws.backward.passes import in_layout
from sqrtdk.laws.processes.formula import ranks_formula
from sqrtdk.laws.processes.shards import PAD, TokenPlaces

Gradients = dict[str, Tensor]  # by "q", "k", "v", in float64 and in the shape of the operands
_KEYS_AND_VALUES = (("k", "v"), ("k",), ("v",))


@dataclass(frozen=True, slots=True)
class BackwardChange:
    """A change of the backward pass.

    Attributes:
        name: A key of the messages `laws.ranks.backward`.
        gradients: Returns the changed gradients of an attention; those that are not in it stay.
        values: Values of the message.
    """

    name: str
    gradients: Callable[[BlockGradients], Gradients]
    values: tuple[tuple[str, str], ...] = ()


class BlockGradients:
    """The gradients of an attention of one process, and of parts of it.

    Args:
        reached: The attention, as many keys as rows.
        d_out: The gradient of its output, (B, H, L, Ev).
        places: Where the tokens of each rank stand.

    Attributes:
        right: The gradients of the formula.
    """

    def __init__(self, reached: Reached, d_out: Tensor, places: TokenPlaces) -> None:
        call, self._places = reached.call, places
        with torch.enable_grad():
            self._operands = tuple(
                vector.values.detach().double().requires_grad_() for vector in (call.query, call.key, call.value)
            )
            formula = ranks_formula(call, *self._operands)
        assert formula is not None
        self._formula, self._d_out = formula, d_out.double()
        with torch.no_grad():
            z = formula.logits.masked_fill(~formula.visible, -math.inf)
            if formula.sinks is not None:
                z = torch.cat((z, formula.sinks.double().view(1, -1, 1, 1).expand(*z.shape[:3], 1)), -1)
            self._p = z.softmax(-1).nan_to_num(0.0)[..., : z.shape[-1] - (formula.sinks is not None)]
            self._dp = self._d_out @ formula.value.mT
            self._row_sum = (self._p * self._dp).sum(-1, keepdim=True)
        piece, _ = places.owner()
        self._rows, self._own = piece[:, None], piece[:, None] == piece[None]
        self.right = self._of(self._p, self._row_sum)

    def _of(self, p: Tensor, row_sum: Tensor, pairs: Tensor | None = None) -> Gradients:
        """Return the gradients for these weights and D, of all pairs of row and key or of some."""
        dz, weights = p * (self._dp - row_sum), p
        if pairs is not None:
            dz, weights = dz * pairs, weights * pairs
        ends = (self._formula.logits, self._formula.value)
        found = torch.autograd.grad(ends, self._operands, (dz, weights.mT @ self._d_out), retain_graph=True)
        return dict(zip("qkv", found, strict=True))

    def of_own_block(self) -> Gradients:
        """Return the gradients of pairs on one rank."""
        return self._of(self._p, self._row_sum, self._own)

    def where_made(self) -> Gradients:
        """Return dk and dv where each rank adds the parts that its rows make to the keys of its own."""
        pieces = self._places.pieces()
        made = {name: torch.zeros_like(self.right[name]) for name in "kv"}
        for number, piece in enumerate(pieces):
            parts = self._of(self._p, self._row_sum, self._rows == number)
            for name in made:
                made[name][:, :, piece] = sum(parts[name][:, :, other] for other in pieces)
        return made

    def of_rank_ahead(self, steps: int) -> Gradients:
        """Return dk and dv where each rank has those of the keys of the rank some steps ahead."""
        pieces = self._places.pieces()
        made = {name: torch.zeros_like(self.right[name]) for name in "kv"}
        for number, piece in enumerate(pieces):
            for name in made:
                made[name][:, :, piece] = self.right[name][:, :, pieces[(number + steps) % len(pieces)]]
        return made

    def _sums_of_blocks(self, of: Tensor) -> Tensor:
        """Return the sum over the keys of each block, (B, H, L, S), at each of its keys."""
        made = torch.zeros_like(of)
        for piece in self._places.pieces():
            at = piece[piece != PAD]
            made[..., at] = of[..., at].sum(-1, keepdim=True).expand(*of.shape[:-1], len(at))
        return made

    def without_lse(self) -> Gradients:
        """Return the gradients with D of each block."""
        share = self._sums_of_blocks(self._p)
        return self._of(self._p, (self._sums_of_blocks(self._p * self._dp) / share).nan_to_num(0.0))

    def by_own_lse(self) -> Gradients:
        """Return the gradients with weights that sum to 1 in each block."""
        return self._of((self._p / self._sums_of_blocks(self._p)).nan_to_num(0.0), self._row_sum)


def backward_changes(places: TokenPlaces) -> Iterator[BackwardChange]:
    """Yield the changes, the most usual first."""
    count = len(places.pieces())
    even = len({len(piece) for piece in places.pieces()}) == 1 and not any(
        bool((p == PAD).any()) for p in places.pieces()
    )
    for some in _KEYS_AND_VALUES:
        of = (("of", "/".join(f"d{name}" for name in some)),)

        def only(
            make: Callable[[BlockGradients], Gradients], names: Sequence[str] = some
        ) -> Callable[[BlockGradients], Gradients]:
            return lambda blocks: {name: make(blocks)[name] for name in names}

        yield BackwardChange("own_rows", only(BlockGradients.of_own_block), of)
        for factor, text in ((1.0 / count, f"1/{count}"), (float(count), str(count))):
            yield BackwardChange("scale", only(_times(factor)), (*of, ("factor", text)))
        if even:
            yield BackwardChange("not_sent", only(BlockGradients.where_made), of)
            for steps in range(1, count):
                yield BackwardChange("wrong_rank", only(_ahead(steps)), (*of, ("steps", str(steps))))
    yield BackwardChange("lse_cut", BlockGradients.without_lse)
    yield BackwardChange("lse_of_block", BlockGradients.by_own_lse)
    yield BackwardChange("own_keys", lambda blocks: {"q": blocks.of_own_block()["q"]})
    yield BackwardChange("own_block", BlockGradients.of_own_block)


def _times(factor: float) -> Callable[[BlockGradients], Gradients]:
    return lambda blocks: {name: gradient * factor for name, gradient in blocks.right.items()}


def _ahead(steps: int) -> Callable[[BlockGradients], Gradients]:
    return lambda blocks: blocks.of_rank_ahead(steps)


def can_be_changed(reached: Reached | None, places: TokenPlaces) -> bool:
    """Return whether an attention's formula is known, over the tokens of all ranks, with handles of all operands."""
    if reached is None or reached.output is None or set(reached.handles) != set("qkv"):
        return False
    call, edges = reached.call, [reached.handles[name].edge for name in "qkv"]
    if len({key_of(edge) for edge in edges}) < 3 or not all(isinstance(edge, GradientEdge) for edge in edges):
        return False
    lengths = {vector.values.shape[2] for vector in (call.query, call.key, call.value)}
    return lengths == {places.total} and ranks_formula(call) is not None


def changed_backward(
    attentions: Sequence[Reached], places: TokenPlaces, change: BackwardChange, stack: ExitStack
) -> None:
    """Change the backward pass at some attentions as long as `stack` is open.

    The gradient that arrives at an operand gets the difference of the changed formula from the right one, so that what
    else reads the operand keeps its part.
    """
    for reached in attentions:
        assert reached.output is not None
        added: Gradients = {}
        _hooked(reached.output, _notes_differences(reached, places, change, added), stack)
        for name, handle in reached.handles.items():
            _hooked(handle, _adds(handle, name, added), stack)


def _hooked(handle: Handle, act: Callable[[Tensor | None], Tensor | None], stack: ExitStack) -> None:
    edge = handle.edge
    if not isinstance(edge, GradientEdge):
        return
    number = edge.output_nr

    def hook(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return (*gradients[:number], act(gradients[number]), *gradients[number + 1 :])

    stack.callback(edge.node.register_prehook(hook).remove)


def _notes_differences(
    reached: Reached, places: TokenPlaces, change: BackwardChange, added: Gradients
) -> Callable[[Tensor | None], Tensor | None]:
    def act(gradient: Tensor | None) -> Tensor | None:
        added.clear()
        if gradient is not None and reached.output is not None:
            blocks = BlockGradients(reached, reached.output.back(gradient.detach()), places)
            added.update({name: new - blocks.right[name] for name, new in change.gradients(blocks).items()})
        return gradient

    return act


def _adds(handle: Handle, name: str, added: Mapping[str, Tensor]) -> Callable[[Tensor | None], Tensor | None]:
    def act(gradient: Tensor | None) -> Tensor | None:
        if name not in added:
            return gradient
        other = in_layout(handle, added[name].to(handle.dtype))
        return other if gradient is None else gradient + other

    return act

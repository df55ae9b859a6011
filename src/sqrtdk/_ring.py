"""Attention whose keys lie in blocks: what joins the blocks' outputs, and a ring of ranks that hold a block each.

With z the logits of a row, o_b and lse_b its output and log sum e^z over the keys of block b:

    lse = log sum_b e^lse_b,   w_b = e^(lse_b - lse),   o = sum_b w_b o_b

and backward, from the gradients do and dlse of the whole:

    do_b = w_b do,   dlse_b = w_b (do . (o_b - o) + dlse)

so that each block's gradients are those of a plain attention that returns its lse.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from sqrtdk import _arguments as arguments
from sqrtdk._attention import attention
from sqrtdk._measure import measure
from sqrtdk._modes import as_merge
from sqrtdk._named import as_request, as_window
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.stats import RowStats
from sqrtdk.stats.request import AuxRequest, aux_output

if TYPE_CHECKING:
    from jaxtyping import Int

    from sqrtdk._shapes import Key, Output, Query, Rows, Value

_WITH_LSE = AuxRequest(lse=True)


def merge(outputs: Sequence[Output], lses: Sequence[Rows]) -> tuple[Output, Rows]:
    """Join attention over several blocks of keys to attention over all of them; differentiable in all arguments.

    `lse = log sum_b e^lse_b` and `output = sum_b e^(lse_b - lse) output_b`. The gradient of the lse counts: a kernel
    that returns an lse without a gradient gives a merge whose gradients of q and k are wrong.

    Args:
        outputs: of each block, (..., Hq, L, Ev).
        lses: of each block, (..., Hq, L), natural-log units; -inf for a row that sees no key of the block.

    Returns:
        The output in the dtype of the outputs, and the lse; 0 and -inf for a row that sees no key of any block.

    Raises:
        InvalidTypeError: An argument is not a sequence of tensors.
        InvalidValueError: There is no block, or numbers or shapes differ.

    Example:
        >>> from sqrtdk import attention
        >>> q, k, v = torch.randn(3, 1, 2, 6, 8).unbind()
        >>> blocks = [
        ...     attention(q, k[:, :, a:b], v[:, :, a:b], is_causal=True, key_offset=a, return_aux=_WITH_LSE)
        ...     for a, b in ((0, 3), (3, 6))
        ... ]
        >>> output, lse = merge([output for output, _ in blocks], [aux.lse for _, aux in blocks])
        >>> torch.allclose(output, attention(q, k, v, is_causal=True), atol=1e-6)
        True

    Reference:
        Rabe & Staats 2021, Self-attention Does Not Need O(n^2) Memory (arXiv:2112.05682).
    """
    both: tuple[tuple[str, Any], ...] = (("outputs", outputs), ("lses", lses))
    for name, tensors in both:
        if isinstance(tensors, Tensor) or not all(isinstance(tensor, Tensor) for tensor in tensors):
            raise InvalidTypeError(f"{name} is a sequence of tensors, one for each block", hint="merge([o1, o2], ...).")
    if not outputs or len(outputs) != len(lses):
        raise InvalidValueError(
            f"each block has an output and an lse; got {len(outputs)} outputs and {len(lses)} lses",
            hint="attention(..., return_aux=AuxRequest(lse=True)) gives both.",
        )
    shapes = {tuple(output.shape) for output in outputs} | {(*lse.shape, outputs[0].shape[-1]) for lse in lses}
    if len(shapes) > 1:
        raise InvalidValueError(
            f"outputs are (..., Hq, L, Ev) and lses (..., Hq, L), alike in all blocks; got outputs "
            f"{[tuple(output.shape) for output in outputs]} and lses {[tuple(lse.shape) for lse in lses]}",
            hint="All blocks have the same rows; flash-attn's lse is (B, Hq, L), its output (B, L, Hq, Ev).",
        )
    merged: tuple[Output, Rows] = as_merge(outputs, lses, lambda: _merged(outputs, lses))
    return merged


def _merged(outputs: Sequence[Output], lses: Sequence[Rows]) -> tuple[Output, Rows]:
    every = torch.stack(list(lses))
    seen = (every > -torch.inf).any(0) | every.isnan().any(0)
    known = every.where(seen, 0.0)  # a row without keys would give -inf - -inf
    lse = known.logsumexp(0)
    dtype = torch.promote_types(outputs[0].dtype, torch.float32)
    weights = (known - lse).exp().to(dtype).where(seen, 0.0)[..., None]
    output = sum(weight * output.to(dtype) for weight, output in zip(weights, outputs, strict=True))
    return output.to(outputs[0].dtype), lse.where(seen, -torch.inf)


def ring_attention(
    query: Query,
    key: Key,
    value: Value,
    group: Any = None,
    *,
    is_causal: bool = False,
    window: Any = None,
    positions: Int[Tensor, "*#B L"] | None = None,
    documents: Int[Tensor, "*#B L"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    enable_gqa: bool = False,
    return_aux: AuxRequest | bool | None = None,
) -> Any:
    """Attention over a sequence that lies in parts on several ranks: the rows of this rank over the keys of all ranks.

    The blocks of keys and values go round the ring of ranks, in the backward pass together with their gradients, so
    that a rank holds two blocks and no L x S matrix. It is a reference to test other implementations against: float32
    inside, one block after another, nothing overlapped. Every rank calls it, and every rank its backward pass.

    Args:
        query: (..., Hq, L, E), this rank's rows. Ranks may have different L.
        key: (..., H, L, E), the keys of the same tokens.
        value: (..., H, L, Ev).
        group: process group; None: all ranks, or this process alone where torch.distributed is not initialised.
        is_causal: a row sees keys whose position is at most its own.
        window: (left, right), in positions; or a number of keys in a causal call, as in `attention`.
        positions: (L,) or (..., L) int64, the positions of this rank's tokens in the sequence, in any order (zigzag,
            striped); None: rank r has the tokens that follow those of rank r - 1.
        documents: (L,) or (..., L) int64; a row sees the keys of its own document. None: one document.
        scale: factor on the product; None: 1/sqrt(E).
        softcap: c of c tanh(z / c).
        enable_gqa: fewer key heads than query heads.
        return_aux: which statistics over the keys of all ranks to return as well. `lse` carries a gradient.

    Returns:
        (..., Hq, L, Ev) of the query's dtype; with `return_aux` also an `AuxOutput` of (..., Hq, L).

    Raises:
        InvalidTypeError, InvalidValueError: As `attention`; or, on every rank, the ranks' shapes, dtypes or options
            differ.

    Example:
        >>> q, k, v = torch.randn(3, 1, 2, 6, 8).unbind()
        >>> order = torch.tensor([0, 5, 1, 4, 2, 3])
        >>> mixed = ring_attention(*(x[:, :, order] for x in (q, k, v)), is_causal=True, positions=order)
        >>> torch.allclose(mixed, attention(q, k, v, is_causal=True)[:, :, order], atol=1e-6)
        True

    Reference:
        Liu, Zaharia & Abbeel 2023, Ring Attention with Blockwise Transformers (arXiv:2310.01889).
    """
    arguments.check_flags(is_causal=is_causal, enable_gqa=enable_gqa)
    arguments.check_tensors(query, key, value)
    arguments.check_head_counts(query, key, value, enable_gqa)
    request = as_request(return_aux)
    if query.shape[-2] != key.shape[-2]:
        raise InvalidValueError(
            f"query and key are of the same tokens; got {query.shape[-2]} rows and {key.shape[-2]} keys",
            hint="Each rank passes the query, key and value of its own tokens.",
        )
    sides = (None, None) if window is None else arguments.window_sides(as_window(window, 0 if is_causal else None, 0))
    numbers = {
        "scale": None if scale is None else arguments.finite_number("scale", scale),
        "softcap": None if softcap is None else arguments.finite_number("softcap", softcap, above=0.0),
    }
    tokens = {
        name: _of_tokens(name, places, query)
        for name, places in (("positions", positions), ("documents", documents))
        if places is not None
    }
    ring = _Ring(group)
    told = {"is_causal": is_causal, "window": sides, **numbers, "enable_gqa": enable_gqa, "aux": request}
    starts = _agreed(ring, {"query": query, "key": key, "value": value, **tokens}, told)
    call = _RingCall(ring, starts, is_causal, sides, {**numbers, "enable_gqa": enable_gqa}, tokens)
    output, lse = _RingAttention.apply(query, key, value, call)  # type: ignore[no-untyped-call]
    if request is None:
        return output
    return output, aux_output(request, _statistics(call, query, key), lse=lse)


class _Ring:
    """The ranks of a group in a ring, and this one's place in it."""

    def __init__(self, group: Any) -> None:
        self.group = group
        alone = not (dist.is_available() and dist.is_initialized())
        self.rank, self.size = (0, 1) if alone else (dist.get_rank(group), dist.get_world_size(group))

    def source(self, step: int) -> int:
        """The rank whose block is here after `step` turns."""
        return (self.rank - step) % self.size

    def turned(self, tensors: Sequence[Tensor], length: int) -> list[Tensor]:
        """Send tensors (..., L, *) to the next rank, and return those of the rank before, whose L is `length`."""
        if self.size == 1:
            return list(tensors)
        ahead, behind = (
            place if self.group is None else dist.get_global_rank(self.group, place)
            for place in ((self.rank + 1) % self.size, (self.rank - 1) % self.size)
        )
        sent = [tensor.contiguous() for tensor in tensors]
        got = [tensor.new_empty(*tensor.shape[:-2], length, tensor.shape[-1]) for tensor in sent]
        todo = [dist.P2POp(dist.isend, tensor, ahead, self.group) for tensor in sent]
        todo += [dist.P2POp(dist.irecv, tensor, behind, self.group) for tensor in got]
        for work in dist.batch_isend_irecv(todo):
            work.wait()
        return got


@dataclass(frozen=True, slots=True, eq=False)
class _RingCall:
    """What does not go round.

    Attributes:
        ring: the ranks.
        starts: place of each rank's first token in the sequence, and the sequence's length.
        is_causal: as in `ring_attention`.
        sides: of the window.
        options: arguments of `attention` that hold for every block.
        tokens: positions and documents of this rank's tokens, (..., L, 1), if they are given.
    """

    ring: _Ring
    starts: tuple[int, ...]
    is_causal: bool
    sides: tuple[int | None, int | None]
    options: dict[str, Any]
    tokens: dict[str, Int[Tensor, "*#B L 1"]]

    def length(self, rank: int) -> int:
        """The number of a rank's tokens."""
        return self.starts[rank + 1] - self.starts[rank]

    def arguments(self, source: int, tokens: dict[str, Int[Tensor, "*#B S 1"]]) -> dict[str, Any]:
        """Return the arguments of `attention` for this rank's rows and the keys of another.

        Args:
            source: the other rank.
            tokens: positions and documents of its keys.
        """
        own, options = self.tokens, dict(self.options)
        rows, keys = self.starts[self.ring.rank], self.starts[source]
        by_place = "positions" not in own
        if by_place:
            options |= {"query_offset": rows, "key_offset": keys, "is_causal": self.is_causal}
            options["window"] = None if self.sides == (None, None) else self.sides
        shown = None
        if "documents" in own:
            shown = own["documents"] == tokens["documents"].mT
        left, right = (None, None) if by_place else self.sides
        if not by_place and (self.is_causal or self.sides != (None, None)):
            ahead = tokens["positions"].mT - own["positions"]  # by how much the key is behind the row in the sequence
            right = 0 if self.is_causal and right is None else right
            bounds = [ahead >= -left] if left is not None else []
            bounds += [ahead <= (0 if self.is_causal else right)] if right is not None else []
            for bound in bounds:
                shown = bound if shown is None else shown & bound
        if shown is not None:
            options["attn_mask"] = shown[..., None, :, :] if shown.dim() > 2 else shown
        return options

    def blocks(self, *travelling: Tensor, home: bool = False) -> Iterator[tuple[dict[str, Any], list[Tensor]]]:
        """Yield, for each block of keys, the arguments of its attention and the block's tensors.

        After each block the list that was yielded goes on to the next rank, with what the caller put into it.

        Args:
            travelling: tensors of this rank's keys.
            home: whether the last turn, which brings each block home, is made.
        """
        names, here = [*self.tokens], [*travelling]
        own = [*self.tokens.values()]
        for step in range(self.ring.size):
            source = self.ring.source(step)
            yield self.arguments(source, dict(zip(names, own, strict=True))), here
            if step + 1 == self.ring.size and not home:
                return
            length = self.length(self.ring.source(step + 1))
            turned = self.ring.turned([*here, *own], length)
            here[:], own = turned[: len(here)], turned[len(here) :]


class _RingAttention(torch.autograd.Function):
    """The output and the lse of this rank's rows; see the formulas at the top of the file."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: _RingCall) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(query.dtype, torch.float32)
        rows, whole = query.to(wide), None
        for options, (keys, values) in call.blocks(key, value):
            output, aux = attention(rows, keys.to(wide), values.to(wide), **options, return_aux=_WITH_LSE)
            whole = (output, aux.lse) if whole is None else merge([whole[0], output], [whole[1], aux.lse])
        assert whole is not None
        ctx.call = call
        ctx.save_for_backward(query, key, value, *whole)
        return whole[0].to(query.dtype), whole[1]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, grad_lse: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, output, lse = ctx.saved_tensors
        wide = output.dtype
        rows = query.detach().to(wide).requires_grad_()
        grad, grad_rows = grad_output.to(wide), torch.zeros_like(rows)
        zeros = [torch.zeros_like(tensor, dtype=wide) for tensor in (key, value)]
        home = []
        for options, block in ctx.call.blocks(key, value, *zeros, home=True):
            keys, values = (tensor.detach().to(wide).requires_grad_() for tensor in block[:2])
            with torch.enable_grad():
                part, aux = attention(rows, keys, values, **options, return_aux=_WITH_LSE)
            weight = (aux.lse.detach() - lse).exp().where(aux.lse.detach() > -torch.inf, 0.0)
            of_lse = weight * ((grad * (part.detach() - output)).sum(-1) + grad_lse)
            of_part = weight[..., None] * grad
            found = torch.autograd.grad(
                (part, aux.lse), (rows, keys, values), (of_part, of_lse), allow_unused=True, materialize_grads=True
            )
            grad_rows += found[0]
            block[2:] = [sum_ + own for sum_, own in zip(block[2:], found[1:], strict=True)]
            home = block
        grads = [made.to(tensor.dtype) for made, tensor in zip(home[2:], (key, value), strict=True)]
        return grad_rows.to(query.dtype), grads[0], grads[1], None


def _statistics(call: _RingCall, query: Query, key: Key) -> RowStats:
    """Return the statistics of this rank's rows over all keys."""
    wide = torch.promote_types(query.dtype, torch.float32)
    found: RowStats | None = None
    for options, (keys,) in call.blocks(key.detach()):
        block = measure(query.detach().to(wide), keys.to(wide), **options)
        found = block if found is None else found.merge(block)
    assert found is not None
    return found


def _of_tokens(name: str, places: Any, query: Query) -> Int[Tensor, "*#B L 1"]:
    """Return one number for each token of a rank as (..., L, 1).

    Raises:
        InvalidTypeError: They are no integers.
        InvalidValueError: They are not (L,) or (..., L).
    """
    if not isinstance(places, Tensor) or places.is_floating_point() or places.dtype == torch.bool:
        got = places.dtype if isinstance(places, Tensor) else type(places).__name__
        raise InvalidTypeError(
            f"{name} are whole numbers, one for each token; got {got}", hint="torch.arange, for one."
        )
    lead = tuple(query.shape[:-3])
    if not places.dim() or places.shape[-1] != query.shape[-2] or tuple(places.shape[:-1]) not in {(), lead}:
        raise InvalidValueError(
            f"{name} are (L,) or (..., L) = {(*lead, query.shape[-2])}; got {tuple(places.shape)}",
            hint="One number for each token of this rank, without a dimension of heads.",
        )
    return places.to(query.device, torch.int64)[..., None]


def _agreed(ring: _Ring, tensors: dict[str, Tensor], options: dict[str, Any]) -> tuple[int, ...]:
    """Return where each rank's tokens begin in the sequence, and its length.

    Raises:
        InvalidValueError: On every rank: the ranks pass tensors of different shapes or dtypes, or other options.
    """
    own = {
        **{name: f"{tensor.dtype} {(*tensor.shape[:-2], 'L', tensor.shape[-1])}" for name, tensor in tensors.items()},
        **{name: repr(option) for name, option in options.items()},
    }
    every: list[Any] = [(tensors["query"].shape[-2], own)]
    if ring.size > 1:
        every = [None] * ring.size
        dist.all_gather_object(every, (tensors["query"].shape[-2], own), group=ring.group)
    for rank, (_, other) in enumerate(every):
        for name in dict.fromkeys([*every[0][1], *other]):
            first, here = every[0][1].get(name, "none"), other.get(name, "none")
            if first != here:
                raise InvalidValueError(
                    f"all ranks of a ring pass the same {name}; got {first} on rank 0, {here} on rank {rank}",
                    hint="L alone may differ: each rank has its own tokens.",
                )
    starts = [0]
    for length, _ in every:
        starts.append(starts[-1] + length)
    return tuple(starts)

"""A resolved attention call: the validated arguments of the public function, ready for any implementation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sqrtdk.impl.mods import MaskMod, ScoreMod, map_mask, map_scores
from sqrtdk.masks.band import Band, in_band, keys_in_band
from sqrtdk.positions import PositionTerm
from sqrtdk.scores import PairScore
from sqrtdk.stats.request import AuxRequest

if TYPE_CHECKING:
    from jaxtyping import Int, Shaped

    from sqrtdk._shapes import Bias, Factor, Key, Logits, Query, Sinks, Value, Visible

UNBOUNDED = (None, None)


@dataclass(frozen=True, slots=True)
class Call:
    """softmax(score_mod(softcap(scale (score(q, k) + content))) + bias over visible keys) v.

    Attributes:
        query: (..., Hq, L, E), with the score folded in, which makes it float32 if the value has a half type.
        key: (..., H, S, E); H divides Hq, and query heads that share a key head are neighbours.
        value: (..., Hv, S, Ev), likewise.
        scale: a number, or a tensor broadcastable to (..., Hq, L, 1).
        score: a score of pairs instead of the dot product.
        exact: why no dot product in float32 is the score exactly enough; see `impl.product`.
        term: a position term: part of the score if it is `content`, otherwise part of the bias.
        softcap: c of c tanh(z / c).
        score_mod: FlexAttention's function of a score and its place; a key whose logit becomes -inf is hidden.
        bias: float, broadcastable to (..., Hq, L, S); it includes float masks, whose -inf entries are in `visible`.
        visible: bool, broadcastable to (..., Hq, L, S), True if the row sees the key.
        mask_mods: FlexAttention's functions of a place; a key must pass all.
        diagonal: row i sees keys j <= i + diagonal; None: all.
        window: (left, right), row i sees keys from i + shift - left to i + shift + right; None: unbounded.
        shift: S - L if rows are aligned to the last key, else 0.
        sinks: (Hq,) logits that join the denominator, or broadcastable to (..., Hq, L, 1); None: no sink.
        dropout_p: of the weights.
        kept: 1 where dropout keeps a weight, else 0, (B, Hq, L, S); None: it is drawn.
        aux: requested statistics.
        places: (L,) positions of the rows if they are a sample; None: 0 to L - 1.
        first: position of the first key for score_mod and term, if hidden keys before it were left out.
        unclean: whether NaN or infinity may be at hidden places, in key, value, bias or a product of query and key.
    """

    query: Query
    key: Key
    value: Value
    scale: float | Factor
    score: PairScore | None = None
    exact: str | None = None
    term: PositionTerm | None = None
    softcap: float | None = None
    score_mod: ScoreMod | None = None
    bias: Bias | None = None
    visible: Visible | None = None
    mask_mods: tuple[MaskMod, ...] = ()
    diagonal: int | None = None
    window: tuple[int | None, int | None] = UNBOUNDED
    shift: int = 0
    sinks: Sinks | None = None
    dropout_p: float = 0.0
    kept: Logits | None = None
    aux: AuxRequest | None = None
    places: Int[Tensor, " L"] | None = None
    first: int = 0
    unclean: bool = False

    @property
    def lead(self) -> tuple[int, ...]:
        """Leading dimensions of the result, (..., Hq); () for tensors without heads."""
        key, value = (_grown(t, self.heads) for t in (self.key, self.value))
        return broadcast(self.query.shape[:-2], key, value)

    @property
    def heads(self) -> int:
        """Number of query heads, Hq; 1 for a query without heads."""
        return self.query.shape[-3] if self.query.ndim > 2 else 1

    @property
    def length(self) -> int:
        """Number of rows, L."""
        return self.query.shape[-2]

    @property
    def keys(self) -> int:
        """Number of keys, S."""
        return self.key.shape[-2]

    @property
    def hides(self) -> bool:
        """Whether a mask of any kind may hide a key from a row."""
        return self.visible is not None or self.banded or self.has_mods

    @property
    def banded(self) -> bool:
        """Whether the diagonal (causal) or the window limits the keys that a row sees."""
        return self.diagonal is not None or self.window != UNBOUNDED

    @property
    def band(self) -> Band:
        """The keys that diagonal and window together leave to each row, as bounds of the distance of row and key.

        Both bounds are inclusive, and None stands for no bound.
        """
        left, right = self.window
        # is_causal with window=(8, 2): both bound the keys to come, and the nearer bound counts.
        aheads = [self.diagonal, None if right is None else right + self.shift]
        known = [ahead for ahead in aheads if ahead is not None]
        return Band(-min(known) if known else None, None if left is None else left - self.shift)

    @property
    def has_mods(self) -> bool:
        """Whether a `score_mod` or `mask_mod` changes the logits, which are then computed block by block."""
        return self.score_mod is not None or bool(self.mask_mods)

    @property
    def elements(self) -> int:
        """Number of elements of the largest tensor that has an entry for each pair of row and key."""
        width = 1 if self.score is None else self.score.width or self.query.shape[-1]
        return math.prod(self.lead) * self.length * self.keys * width

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of logits and statistics: float32, or float64 for float64 inputs."""
        return torch.float64 if torch.float64 in (self.query.dtype, self.key.dtype) else torch.float32

    def positions(self, start: int, stop: int) -> Int[Tensor, " {stop}-{start}"]:
        """Return the positions of the rows start..stop - 1, int64 (stop - start,); of a sample, those in `places`."""
        if self.places is not None:
            return self.places[start:stop]
        return torch.arange(start, stop, device=self.query.device)

    def sample(self, rows: Int[Tensor, " R"]) -> Call:
        """Return the same call for some of its rows, (R,) int64 indices; the rows keep their positions."""

        def pick(tensor: Tensor) -> Tensor:
            # One row that broadcasts stands for all rows, so there is nothing to pick.
            return tensor.index_select(-2, rows) if tensor.ndim > 1 and tensor.shape[-2] != 1 else tensor

        return replace(
            self,
            query=self.query.index_select(-2, rows),
            scale=pick(self.scale) if isinstance(self.scale, Tensor) else self.scale,
            bias=None if self.bias is None else pick(self.bias),
            visible=None if self.visible is None else pick(self.visible),
            sinks=None if self.sinks is None else pick(self.sinks),
            places=rows,
        )

    def visible_mask(self, start: int, stop: int) -> Visible | None:
        """Return the keys that the rows start..stop - 1 see.

        Returns:
            A bool mask that is True at visible keys and broadcasts to (..., stop - start, S); None if every row sees
            every key.
        """
        found = None if self.visible is None else cut_rows(self.visible, start, stop)
        shown = [self._shown(mod, start, stop) for mod in self.mask_mods]
        if self.banded:
            columns = torch.arange(self.keys, device=self.query.device)
            shown.append(in_band(self.positions(start, stop).unsqueeze(-1), columns, self.band))
        for keys in shown:
            found = keys if found is None else found & keys
        return found

    def _shown(self, mod: MaskMod, start: int, stop: int) -> Visible:
        lead = self.lead
        heads = lead[-1] if lead else 1
        return self.in_lead(map_mask(mod, math.prod(lead[:-1]), heads, self.positions(start, stop), self.keys))

    def in_lead(self, of_pairs: Shaped[Tensor, "#B #Hq R S"]) -> Shaped[Tensor, "*#BHq R S"]:
        """Return results of a function of one pair, (#B, #Hq, R, S), with the leading dimensions of this call.

        B stands for all leading dimensions but the heads. Dimensions that the call lacks are removed.
        """
        lead = self.lead
        if len(lead) > 2 and of_pairs.shape[0] != 1:
            return of_pairs.reshape(*lead[:-1], *of_pairs.shape[1:])
        return of_pairs[(0,) * max(0, 2 - len(lead))]

    def modified(self, scores: Logits, start: int, stop: int) -> Logits:
        """Return scores after `score_mod`, which the call must have.

        Args:
            scores: Scores of the rows, broadcastable to (..., Hq, stop - start, S).
            start: First row.
            stop: Row after the last one.

        Returns:
            (..., Hq, stop - start, S).
        """
        assert self.score_mod is not None
        lead = self.lead
        scores = scores.expand(*lead, stop - start, self.keys)
        four = scores.reshape(math.prod(lead[:-1]), lead[-1] if lead else 1, *scores.shape[-2:])
        return map_scores(self.score_mod, four, self.positions(start, stop), self.first).reshape(scores.shape)

    def visible_keys(self) -> Factor:
        """Return the number of keys that each row sees, in the call's dtype; it broadcasts to (..., Hq, L, 1)."""
        if self.visible is None and not self.mask_mods:
            if not self.banded:
                return torch.full((1, 1), self.keys, dtype=self.dtype, device=self.query.device)
            return keys_in_band(self.positions(0, self.length).unsqueeze(-1), self.keys, self.band).to(self.dtype)
        visible = self.visible_mask(0, self.length)
        assert visible is not None
        return visible.expand(*visible.shape[:-1], self.keys).sum(-1, keepdim=True).to(self.dtype)


def broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    """Return the shape that the shapes broadcast to.

    Raises:
        RuntimeError: They do not broadcast.
    """
    # a shortcut: torch's own function takes 30 us
    if shapes and all(tuple(shape) == tuple(shapes[0]) for shape in shapes):
        return tuple(shapes[0])
    return tuple(torch.broadcast_shapes(*map(tuple, shapes)))  # type: ignore[no-untyped-call]


def cut_rows(tensor: Tensor, start: int, stop: int) -> Tensor:
    """Return the rows start..stop - 1 of a tensor that broadcasts to (..., L, S) or (..., L, 1), as a view.

    A tensor with one row for all, or without a dimension of rows, is returned whole.
    """
    return tensor[..., start:stop, :] if tensor.ndim > 1 and tensor.shape[-2] != 1 else tensor


def repeat_key_heads(tensor: Shaped[Tensor, "... S E"], heads: int) -> Shaped[Tensor, "... S E"]:
    """Return key or value heads repeated to the number of query heads; query head h uses head h // group.

    Example:
        >>> repeat_key_heads(torch.tensor([0.0, 1.0]).reshape(2, 1, 1), 4).flatten()
        tensor([0., 0., 1., 1.])
    """
    if tensor.ndim < 3 or tensor.shape[-3] in (1, heads) or heads == 1:
        return tensor
    # k0 k0 k1 k1, as in Llama: query heads that share a key head are neighbours.
    return tensor.repeat_interleave(heads // tensor.shape[-3], -3)


def _grown(tensor: Key | Value, heads: int) -> tuple[int, ...]:
    shape = tuple(tensor.shape[:-2])
    return (*shape[:-1], heads) if shape and shape[-1] not in (1, heads) and heads != 1 else shape


def transformed() -> bool:
    """Return whether a transform of `torch.func`, such as `vmap`, is active."""
    return torch._C._functorch.maybe_current_level() is not None


def has_values(*tensors: Tensor) -> bool:
    """Return whether Python may read the numbers of the tensors.

    It may not while a model is compiled, under a transform, or for tensors on "meta" and subclasses.
    """
    if torch.compiler.is_compiling() or transformed():
        return False
    return all(type(t) in (Tensor, torch.nn.Parameter) and not t.is_meta for t in tensors)

"""Sequences of unlike lengths in one tensor, end to end or padded, brought into one row a sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sqrtdk.tracing.read import bands


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """Where the sequences of one side lie among its tokens (T, H, E), or (N, L, H, E) with L tokens each.

    Attributes:
        count: N.
        longest: tokens of the longest; without data, of the longest that there may be.
        starts: (N,) first token of each; None where all are of one length, and without data.
        lengths: (N,) tokens of each; None where `starts` is.
        known: the lengths are.
    """

    count: int
    longest: int
    starts: Tensor | None = None
    lengths: Tensor | None = None
    known: bool = True

    @classmethod
    def of(cls, operand: Tensor, ends: Tensor | None, used: Tensor | None, longest: int | None) -> Sequences:
        """Those of an operand.

        Args:
            operand: (T, H, E) or (1, T, H, E) where there are `ends`, else (N, L, H, E).
            ends: (N + 1,) where the sequences end, the first of them 0.
            used: (N,) how many tokens of each take part; None where all do.
            longest: what the kernel was told.
        """
        if ends is None:
            count, length = operand.shape[:2]
            if used is None or used.is_meta:
                return cls(count, length, known=used is None)
            return cls(count, length, torch.arange(count, device=used.device) * length, used.long())
        count = ends.shape[0] - 1
        if ends.is_meta or (used is not None and used.is_meta):
            return cls(count, int(longest or operand.shape[-3]), known=False)
        lengths = ends.diff() if used is None else used
        most = int(lengths.max()) if count else 0
        if count * most == operand.shape[-3] and bool((lengths == most).all()):
            return cls(count, most)
        return cls(count, most, ends[:-1].long(), lengths.long())

    def spread(self, tokens: Tensor) -> Tensor:
        """(N, H, longest, E) of the tokens, zeros where a sequence has ended."""
        exists = self.exists(tokens.device)
        if self.starts is None or exists is None:
            return tokens.reshape(self.count, self.longest, *tokens.shape[-2:]).transpose(1, 2)
        flat = tokens.reshape(-1, *tokens.shape[-2:])
        at = self.starts[:, None] + torch.arange(self.longest, device=flat.device)
        rows = flat[at.clamp(max=max(len(flat) - 1, 0))]
        return rows.masked_fill(~exists[:, :, None, None], 0.0).transpose(1, 2)

    def exists(self, device: torch.device) -> Tensor | None:
        """(N, longest), False where a sequence has ended; None where all are as long, and without data."""
        if self.lengths is None:
            return None
        return torch.arange(self.longest, device=device) < self.lengths.to(device)[:, None]


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Queries and keys of the same sequences.

    Attributes:
        queries: where the queries lie.
        keys: where the keys lie.
        device: of both.
    """

    queries: Sequences
    keys: Sequences
    device: torch.device

    @property
    def elements(self) -> int:
        """Of a mask."""
        count = self.queries.count if self.unlike else 1
        return count * self.queries.longest * self.keys.longest

    @property
    def unlike(self) -> bool:
        """Whether sequences differ in length, as far as it is known."""
        return self.queries.lengths is not None or self.keys.lengths is not None

    @property
    def known(self) -> bool:
        """Whether the lengths are."""
        return self.queries.known and self.keys.known

    def offset(self) -> Tensor:
        """(N, 1, 1, 1) S - L: the last query stands beside the last key where row i is put beside key i + offset."""
        ends = (
            torch.full((1,), side.longest, device=self.device) if side.lengths is None else side.lengths.to(self.device)
            for side in (self.keys, self.queries)
        )
        keys, queries = ends
        return (keys - queries)[:, None, None, None]

    def distance(self, *, lower_right: bool) -> Tensor:
        """(N or 1, 1, L, S) of i - j, the last query beside the last key where `lower_right`, else the first ones."""
        i = torch.arange(self.queries.longest, device=self.device)[:, None]
        distance = i - torch.arange(self.keys.longest, device=self.device)
        return distance + self.offset() if lower_right else distance[None, None]

    def visible(self, left: int | None, right: int | None, *, lower_right: bool) -> Tensor | None:
        """(N or 1, 1, L, S) True where the row sees the key: `left` keys before its own, `right` after it.

        A side that is None has no bound. None where every key is visible.
        """
        distance = self.distance(lower_right=lower_right)
        visible = torch.ones_like(distance, dtype=torch.bool)
        if left is not None:
            visible &= distance <= left
        if right is not None:
            visible &= distance >= -right
        exists = self.exist()
        hidden = ~visible if exists is None else ~visible & exists
        if not bool(hidden.any()):
            return None
        return visible if exists is None else visible & exists

    def exist(self) -> Tensor | None:
        """(N, 1, L, S) True where both the query and the key are of the sequence; None where all are."""
        rows, columns = (side.exists(self.device) for side in (self.queries, self.keys))
        parts = [] if rows is None else [rows[:, None, :, None]]
        parts += [] if columns is None else [columns[:, None, None, :]]
        if not parts:
            return None
        return parts[0] & parts[1] if len(parts) == 2 else parts[0]

    def too_large(self) -> str | None:
        """Why no mask of them is made; None where it can be."""
        if self.elements <= bands.LARGEST:
            return None
        rows, columns = self.queries.longest, self.keys.longest
        return f"a mask of {self.queries.count} x {rows} rows and {columns} keys would have to be held"

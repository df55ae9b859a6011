"""What many ranks send and hold, in bytes, from sizes alone: for machines that are larger than the one at hand.

N ranks hold L / N of the L tokens each; B sequences, Hq query heads, H key heads, E and Ev features, s bytes a number
of q, k and v, w bytes of a number in the ring's sums (4, and 8 for float64).

    forward of a ring     (N - 1) B H (L / N) (E + Ev) s
    its backward          N B H (L / N) (E + Ev) (s + w)      # blocks go all the way home, with their gradients
    its statistics        (N - 1) B H (L / N) E s             # with return_aux
"""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import fields as fields_of

from sqrtdk.monitor.packed import HEAD
from sqrtdk.monitor.sums import MAXIMUM_COLUMNS, SUM_COLUMNS
from sqrtdk.stats import RowStats

_ORDERED = ("max_logit", "entropy_nats")  # columns of which every row is sent, for quantiles
_GRADIENTS = ("query_grad", "key_grad")
_RECORD, _RECORD_A_HEAD = 1_700, 720  # bytes of a record as JSON, most of them histograms; measured


@dataclass(frozen=True, slots=True, kw_only=True)
class RingSizes:
    """Sizes of one attention over a ring of ranks.

    Attributes:
        ranks: N.
        tokens: L, of all ranks.
        heads: Hq.
        key_heads: H.
        head_dim: E, and Ev.
        batch: B.
        itemsize: bytes of a number of q, k and v.
    """

    ranks: int
    tokens: int
    heads: int
    key_heads: int
    head_dim: int
    batch: int = 1
    itemsize: int = 2

    @property
    def wide(self) -> int:
        """Bytes of a number in the sums: those of float32, or of float64 for such inputs."""
        return max(4, self.itemsize)

    @property
    def own(self) -> int:
        """Tokens of one rank, L / N."""
        return self.tokens // self.ranks

    def _numbers(self, heads: int) -> int:
        return self.batch * heads * self.own * self.head_dim

    def sent_forward(self, *, statistics: bool = False) -> int:
        """Return the bytes that a rank sends in the forward pass.

        Args:
            statistics: whether statistics over the keys of all ranks are asked for, `return_aux`.

        Example:
            >>> RingSizes(ranks=4, tokens=64, heads=4, key_heads=2, head_dim=8).sent_forward()
            3072
        """
        block = self._numbers(self.key_heads) * self.itemsize
        return (self.ranks - 1) * (2 + statistics) * block

    def sent_backward(self) -> int:
        """Return the bytes that a rank sends in the backward pass."""
        return self.ranks * 2 * self._numbers(self.key_heads) * (self.itemsize + self.wide)

    def held(self) -> int:
        """Return the bytes of the tensors that a rank holds at once in the forward pass, beside tiles of logits.

        These are its own q, k and v; the block that is here and the one that comes; and in the dtype of the sums copies
        of q and of the block, and five tensors of the output's size while two blocks are merged.
        """
        rows, block = self._numbers(self.heads), 2 * self._numbers(self.key_heads)
        return (rows + 3 * block) * self.itemsize + (6 * rows + block) * self.wide

    def logits(self) -> int:
        """Return the bytes of all logits of a rank's rows at once, which are never held."""
        return self.batch * self.heads * self.own * self.tokens * self.wide

    def row_statistics(self, rows: int | None = None) -> int:
        """Return the bytes that a watch holds for one attention until its pass ends: of each block its statistics.

        Args:
            rows: of a rank's sequence that are measured; None: all.
        """
        measured = self.own if rows is None else min(rows, self.own)
        return self.ranks * len(fields_of(RowStats)) * self.batch * self.heads * measured * self.wide


def sample_bytes(heads: int, rows: int, *, attentions: int = 1, gradients: bool = False) -> int:
    """Return the bytes of one rank's row of a sample, as `watch` gathers them from every rank.

    Args:
        heads: query heads of an attention on this rank.
        rows: of all sequences that are measured on this rank.
        attentions: number of attentions.
        gradients: whether gradients of q and k are known, of as many rows.

    Example:
        >>> sample_bytes(4, 16, attentions=2)
        2840
    """
    ordered = len(_ORDERED) + gradients * len(_GRADIENTS)
    call = 8 * (1 + 2 + ordered) + 8 * heads * (len(SUM_COLUMNS) + len(MAXIMUM_COLUMNS)) + 4 * heads * rows * ordered
    return HEAD + attentions * call


def record_bytes(heads: int) -> int:
    """Return the bytes of the record of one attention as JSON, about: what a check knows of it, with statistics.

    Args:
        heads: query heads on this rank.
    """
    return _RECORD + _RECORD_A_HEAD * heads

"""How blocks of keys of several ranks may be joined wrongly, each way with the output that it would give.

With o_s and lse_s of the block of rank s, m_s its largest logit, the right sum is sum_s w_s o_s, w = softmax_s(lse_s).
Faults that people make:

    averaged, added         w_s = 1 / N, or 1
    last block              w_s = 1 for the block that came last
    base of the lse         lse_s / log 2, or lse_s log 2: a kernel gives it in base 2, the merge takes e
    largest logit           w = softmax_s(m_s)
    not rescaled            w = softmax_s(lse_s - M_s), M_s the largest logit so far: sums of e^(z - M) are added as
                            they are where the largest logit grows; or M_s = m_s
    lse not merged          step by step with the lse of the first block, never that of all so far
    sink in every block     each block counts the sink, the merge N times; or no block does
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sqrtdk.laws.processes.formula import RanksChange, RanksFormula
from sqrtdk.laws.processes.shards import TokenPlaces


def merge_changes(formula: RanksFormula, places: TokenPlaces) -> Iterator[RanksChange]:
    """Yield the changes of how an attention's blocks of keys are joined; some may change nothing.

    Args:
        formula: The attention; as many keys as rows.
        places: Where the tokens of each rank stand.
    """
    blocks = _blocks(formula, places)
    met, some = blocks.met.sum(0), blocks.seen.sum(0)
    if formula.sinks is not None:
        yield RanksChange("sink_dropped", blocks.joined(blocks.lse))
        for count in (torch.tensor(float(len(blocks.lse))), met, some):
            of_keys = blocks.kept(count.clamp(min=1).log())
            yield RanksChange("sink_per_block", blocks.joined(blocks.lse) * of_keys)
    for outputs in blocks.with_and_without_sinks():
        for count in (torch.tensor(float(len(blocks.lse))), met, some):
            yield RanksChange("blocks_averaged", outputs.sum(0) / count.clamp(min=1))
        yield RanksChange("blocks_added", outputs.sum(0))
    for log_weights in (blocks.lse / math.log(2), blocks.lse * math.log(2)):
        yield RanksChange("lse_base", blocks.merged(log_weights))
    yield RanksChange("max_for_lse", blocks.merged(blocks.largest))
    yield RanksChange("not_rescaled", blocks.merged(blocks.lse - blocks.largest))
    for order in _orders(places):
        yield from _of_order(blocks.taken(order))


def _of_order(blocks: _Blocks) -> Iterator[RanksChange]:
    """Yield the changes that depend on the order in which rows meet the blocks."""
    so_far = blocks.largest.cummax(0).values
    log_weights = torch.where(blocks.lse.isfinite(), blocks.lse - so_far, -math.inf)
    yield RanksChange("not_rescaled", blocks.merged(log_weights))
    right_sum = blocks.lse.logsumexp(0) - so_far[-1]  # the sum of weights is rescaled, that of outputs is not
    added = ((log_weights - right_sum).exp().nan_to_num(0.0) * blocks.outputs).sum(0)
    yield RanksChange("not_rescaled", added * blocks.kept())
    for of in (blocks.met, torch.ones_like(blocks.met)):
        steps = torch.arange(1, len(of) + 1).view(-1, 1, 1, 1, 1)
        last = (of * steps).argmax(0, keepdim=True).expand(1, *blocks.outputs.shape[1:])
        yield RanksChange("last_block", blocks.outputs.gather(0, last)[0] * blocks.kept())
    output, lse = blocks.outputs[0], blocks.lse[0]
    for other, of_other in zip(blocks.outputs[1:], blocks.lse[1:], strict=True):
        output = output + (of_other - lse).sigmoid().nan_to_num(0.0) * (other - output)
    yield RanksChange("lse_not_merged", output * blocks.kept())


@dataclass(frozen=True, slots=True, eq=False)
class _Blocks:
    """The blocks of keys that rows meet, in some order.

    Attributes:
        outputs: (N, B, H, L, Ev), without sinks; 0 in rows that see no key of the block.
        lse: (N, B, H, L, 1).
        largest: (N, B, H, L, 1), the largest logit.
        met: Whether some row of the same rank sees a key of the block, as `lse`: others are skipped.
        sinks: (H, 1, 1), or None.
        total: lse of all blocks, (B, H, L, 1).
    """

    outputs: Tensor
    lse: Tensor
    largest: Tensor
    met: Tensor
    sinks: Tensor | None
    total: Tensor

    @property
    def seen(self) -> Tensor:
        """Whether a row sees a key of a block."""
        return self.lse.isfinite().double()

    def kept(self, more: Tensor | None = None) -> Tensor:
        """Return the share of all weight that the sinks leave to the keys, where a sink counts e^more times."""
        if self.sinks is None:
            return torch.tensor(1.0)
        return (self.total - self.sinks - (0.0 if more is None else more)).sigmoid()

    def joined(self, log_weights: Tensor) -> Tensor:
        """Return the sum of outputs, weighted by the softmax over blocks, without sinks."""
        return (log_weights.softmax(0).nan_to_num(0.0) * self.outputs).sum(0)

    def merged(self, log_weights: Tensor) -> Tensor:
        """Return the sum of outputs, weighted by the softmax over blocks, with the sinks counted once."""
        return self.joined(log_weights) * self.kept()

    def with_and_without_sinks(self) -> Iterator[Tensor]:
        """Yield the outputs of blocks whose softmax has the sinks, and of blocks that have none."""
        if self.sinks is not None:
            yield self.outputs * (self.lse - self.sinks).sigmoid()
        yield self.outputs

    def taken(self, order: Tensor) -> _Blocks:
        """Return the blocks in another order for each row, (N, L)."""
        at = order[:, None, None, :, None]

        def moved(of: Tensor) -> Tensor:
            return of.gather(0, at.expand_as(of))

        return _Blocks(
            moved(self.outputs), moved(self.lse), moved(self.largest), moved(self.met), self.sinks, self.total
        )


def _blocks(formula: RanksFormula, places: TokenPlaces) -> _Blocks:
    piece, _ = places.owner()
    count = len(places.pieces())
    parts = [formula.block(formula.visible & (piece == shard)) for shard in range(count)]
    outputs, lse, largest = (torch.stack(each) for each in zip(*parts, strict=True))
    met = torch.zeros_like(lse)
    for shard in range(count):
        met[..., piece == shard, :] = lse[..., piece == shard, :].isfinite().any(-2, keepdim=True).double()
    sinks = None if formula.sinks is None else formula.sinks.view(-1, 1, 1)
    return _Blocks(outputs, lse, largest, met, sinks, lse.logsumexp(0))


def _orders(places: TokenPlaces) -> Iterator[Tensor]:
    """Yield the shard that each row meets at each step, (N, L): a ring in both directions, and a loop over shards."""
    piece, _ = places.owner()
    count = len(places.pieces())
    steps = torch.arange(count)[:, None]
    yield (piece - steps) % count
    if count > 2:
        yield (piece + steps) % count
    yield steps.expand(count, len(piece))

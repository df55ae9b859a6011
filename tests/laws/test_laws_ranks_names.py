"""Law `ranks`: a fault of masks or merges is named by the output that it gives, computed here row by row."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sqrtdk.laws.processes.backward_names import names_of_backward
from sqrtdk.laws.processes.changes import forward_changes
from sqrtdk.laws.processes.formula import RanksFormula, fitting_changes, ranks_formula
from sqrtdk.laws.processes.gradients import gradients_beside
from sqrtdk.laws.processes.parting import BAR
from sqrtdk.laws.processes.shards import TokenPlaces, token_orders
from sqrtdk.tracing.trace import Trace

TOKENS, SEEN_BACK, SECOND, PADDED = 16, 5, 7, 2
Sees = Callable[[int, int], bool]


def _same_document(i: int, j: int) -> bool:
    return (i < SECOND) == (j < SECOND)


def _right(i: int, j: int) -> bool:
    return j <= i < j + SEEN_BACK and _same_document(i, j)


def _padded(i: int, j: int) -> bool:
    return _right(i, j) and j >= PADDED


def _stored(i: int) -> int:
    """The row in which two ranks hold token i in zigzag: 0123 and 12 to 15, then 4 to 11."""
    return i if i < 4 else i - 8 if i >= 12 else i + 4


def _whole_rank(i: int, j: int) -> bool:
    return i // 8 == j // 8


def _number(i: int) -> int:
    """The document of a token on two ranks that each count from 0."""
    return int(SECOND <= i < 8)


def _other_way(i: int, j: int) -> bool:
    """On four ranks, where the block of the rank n behind is taken for that of the rank n ahead."""
    rank, of_key = i // 4, j // 4
    taken_for = (2 * rank - of_key) % 4 * 4 + j % 4
    return taken_for <= i < taken_for + SEEN_BACK and _same_document(i, j)


MASKS: dict[str, tuple[str, int, Sees, Sees]] = {  # order, ranks, what row i sees of key j on one process, and on ranks
    "local_rows": ("whole", 2, _right, lambda i, j: j % 8 <= i % 8 < j % 8 + SEEN_BACK and _same_document(i, j)),
    "documents": ("whole", 2, _right, lambda i, j: j <= i < j + SEEN_BACK),
    "window": ("zigzag", 2, _right, lambda i, j: j <= i and _same_document(i, j)),
    "window_and_documents": ("zigzag", 2, _right, lambda i, j: j <= i),
    "padding": ("whole", 2, _padded, _right),
    "order": ("zigzag", 2, _right, lambda i, j: _stored(j) <= _stored(i) and _same_document(i, j)),
    "own_keys": ("striped", 2, _right, lambda i, j: _right(i, j) and i % 2 == j % 2),
    "causal": ("whole", 2, lambda i, j: j <= i, lambda i, j: True),
    "remote_documents": (
        "whole", 4, _right, lambda i, j: _right(i, j) if i // 4 == j // 4 else j <= i < j + SEEN_BACK,
    ),
    "remote_window": (
        "whole", 2, _right, lambda i, j: _right(i, j) if _whole_rank(i, j) else j <= i and _same_document(i, j),
    ),
    "remote_window_and_documents": (
        "whole", 2, _right, lambda i, j: _right(i, j) if _whole_rank(i, j) else j <= i,
    ),
    "remote_padding": (
        "whole", 2, lambda i, j: PADDED <= j <= i, lambda i, j: j <= i and (j >= PADDED or not _whole_rank(i, j)),
    ),
    "remote_plain": ("whole", 2, _padded, lambda i, j: _padded(i, j) if _whole_rank(i, j) else j <= i),
    "remote_causal": ("whole", 2, lambda i, j: j <= i, lambda i, j: j <= i or not _whole_rank(i, j)),
    "documents_numbered": ("whole", 2, _right, lambda i, j: j <= i < j + SEEN_BACK and _number(i) == _number(j)),
    "ring_direction": ("whole", 4, _right, _other_way),
}  # fmt: skip


def _mask(sees: Sees) -> Tensor:
    return torch.tensor([[bool(sees(i, j)) for j in range(TOKENS)] for i in range(TOKENS)])


class Masked(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor | None = None) -> Tensor:
        if sinks is None:
            return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        z = (q @ k.mT / 8**0.5).masked_fill(~mask, -torch.inf)
        z = torch.cat((z, sinks.view(1, -1, 1, 1).expand(*z.shape[:3], 1)), -1)
        return z.softmax(-1)[..., :-1] @ v


def _formula(*inputs: Tensor) -> RanksFormula:
    with Trace(Masked(), keep=True, stats=False) as trace:
        Masked()(*inputs)
    formula = ranks_formula(trace.tensors[0])
    assert formula is not None
    return formula


def _places(order: str, count: int) -> TokenPlaces:
    return next(one for one in token_orders(TOKENS, [TOKENS // count] * count) if one.order == order)


def _names(formula: RanksFormula, places: TokenPlaces, output: Tensor) -> list[str]:
    return [one.name for one in fitting_changes(forward_changes(formula, places), output, BAR)]


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_named_by_the_output_that_it_gives(name: str) -> None:
    order, count, right, sees = MASKS[name]
    q, k, v = torch.randn(3, 1, 2, TOKENS, 8)
    formula, places = _formula(q, k, v, _mask(right)), _places(order, count)
    scores = (q.double() @ k.double().mT / 8**0.5).masked_fill(~_mask(sees), float("-inf"))
    output = scores.softmax(-1).nan_to_num(0.0) @ v.double()
    assert _names(formula, places, output) == [name]
    assert _names(formula, places, output + 0.01 * torch.randn_like(output)) == []
    assert _names(formula, places, formula.output()) == []


# -- merges ------------------------------------------------------------------------------------------------------------

Block = tuple[Tensor, float, float]  # output (Ev,), lse and largest logit of one row; -inf where it sees no key


def _weighted(blocks: list[Block], weights: list[float]) -> Tensor:
    total = sum(weights)
    return sum((weight / total * one[0] for weight, one in zip(weights, blocks, strict=True)), torch.tensor(0.0))


def _online(blocks: list[Block]) -> Tensor:
    """An online softmax that never rescales what it has when the largest logit grows."""
    most, output, total = -math.inf, torch.tensor(0.0), 0.0
    for one, lse, largest in blocks:
        most = max(most, largest)
        weight = math.exp(lse - most)
        output, total = output + weight * one, total + weight
    return output / total


def _half_rescaled(blocks: list[Block]) -> Tensor:
    """The same where the sum of weights is rescaled, and that of outputs is not."""
    most, output, total = -math.inf, torch.tensor(0.0), 0.0
    for one, lse, largest in blocks:
        before, most = most, max(most, largest)
        total = total * math.exp(before - most) + math.exp(lse - most)
        output = output + math.exp(lse - most) * one
    return output / total


def _first_lse(blocks: list[Block]) -> Tensor:
    output, first = blocks[0][0], blocks[0][1]
    for one, lse, _ in blocks[1:]:
        output = output + (one - output) / (1.0 + math.exp(first - lse))
    return output


MERGES: dict[str, tuple[str, Callable[[list[Block]], Tensor]]] = {
    "mean": ("blocks_averaged", lambda blocks: torch.stack([one for one, _, _ in blocks]).mean(0)),
    "sum": ("blocks_added", lambda blocks: torch.stack([one for one, _, _ in blocks]).sum(0)),
    "base_2_for_e": ("lse_base", lambda blocks: _weighted(blocks, [2.0**lse for _, lse, _ in blocks])),
    "e_for_base_2": (
        "lse_base",
        lambda blocks: _weighted(blocks, [math.exp(lse / math.log(2)) for _, lse, _ in blocks]),
    ),
    "largest": ("max_for_lse", lambda blocks: _weighted(blocks, [math.exp(most) for _, _, most in blocks])),
    "own_largest": ("not_rescaled", lambda blocks: _weighted(blocks, [math.exp(lse - m) for _, lse, m in blocks])),
    "online": ("not_rescaled", _online),
    "half_rescaled": ("not_rescaled", _half_rescaled),
    "last": ("last_block", lambda blocks: blocks[-1][0]),
    "first_lse": ("lse_not_merged", _first_lse),
}


@pytest.mark.parametrize("direction", [1, -1])
@pytest.mark.parametrize("name", MERGES)
def test_a_merge_is_named_by_the_output_that_it_gives(name: str, direction: int) -> None:
    code, join = MERGES[name]
    q, k, v = torch.randn(3, 1, 2, TOKENS, 8)
    q = 3.0 * q
    formula, places = _formula(q, k, v, torch.ones(TOKENS, TOKENS, dtype=torch.bool)), _places("striped", 4)
    z = q.double() @ k.double().mT / 8**0.5
    output = torch.empty(1, 2, TOKENS, 8, dtype=torch.float64)
    for head in range(2):
        for row in range(TOKENS):
            blocks = []
            for step in range(4):
                keys = slice((row % 4 + direction * step) % 4, None, 4)
                part = z[0, head, row, keys]
                blocks.append(
                    (part.softmax(0) @ v[0, head, keys].double(), float(part.logsumexp(0)), float(part.max()))
                )
            output[0, head, row] = join(blocks)
    assert _names(formula, places, output) == [code]


@pytest.mark.parametrize(("name", "count"), [("sink_per_block", 2.0), ("sink_dropped", 0.0)])
def test_sinks_of_every_block_are_named(name: str, count: float) -> None:
    q, k, v = torch.randn(3, 1, 2, TOKENS, 8)
    sinks, mask = torch.tensor([0.5, 1.5]), torch.ones(TOKENS, TOKENS, dtype=torch.bool)
    formula, places = _formula(q, k, v, mask, sinks), _places("whole", 2)
    assert formula.sinks is not None
    z = q.double() @ k.double().mT / 8**0.5
    total = z.exp().sum(-1, keepdim=True) + count * sinks.double().exp().view(1, 2, 1, 1)
    assert _names(formula, places, z.exp() / total @ v.double()) == [name]
    assert _names(formula, places, formula.output()) == []


def test_blocks_that_causal_rows_skip_count_no_sink() -> None:
    """The rows of the first rank skip the block of the second; those of the second count the sink twice."""
    q, k, v = torch.randn(3, 1, 1, TOKENS, 8)
    sinks, mask = torch.tensor([0.5]), torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    formula = _formula(q, k, v, mask, sinks)
    weights = (q.double() @ k.double().mT / 8**0.5).exp() * mask
    times = 1.0 + (torch.arange(TOKENS) >= TOKENS // 2)[:, None]
    output = weights / (weights.sum(-1, keepdim=True) + times * math.exp(0.5)) @ v.double()
    assert _names(formula, _places("whole", 2), output) == ["sink_per_block"]


def test_rows_without_a_key_stay_at_zero() -> None:
    """Keys of the first rank are padding, so its blocks are empty, and nothing becomes NaN."""
    q, k, v = torch.randn(3, 1, 1, TOKENS, 8)
    mask = (torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()) & (torch.arange(TOKENS) >= TOKENS // 2)
    formula = _formula(q, k, v, mask)
    changes: list[Any] = [*forward_changes(formula, _places("whole", 2))]
    assert changes
    assert all(bool(one.output.isfinite().all()) for one in changes)


# -- backward passes ---------------------------------------------------------------------------------------------------

RANKS = 2
RANK_OF = torch.arange(TOKENS) % RANKS  # striped


class Flawed(torch.autograd.Function):
    """Causal attention whose backward pass sums over ranks otherwise; the parts are computed pair by pair."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, fault: str) -> Tensor:
        z = (q @ k.mT / 8**0.5).masked_fill(~torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril(), -torch.inf)
        p = z.softmax(-1)
        ctx.fault = fault
        ctx.save_for_backward(q, k, v, p, z)
        return p @ v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, p, z = ctx.saved_tensors
        fault, d_out = ctx.fault, grads[0]
        same = RANK_OF[:, None] == RANK_OF
        dp, row_sum = d_out @ v.mT, (d_out * (p @ v)).sum(-1, keepdim=True)
        if fault in ("lse_cut", "lse_of_block"):
            of_rank = [z.masked_fill(rank != RANK_OF, -torch.inf).softmax(-1).nan_to_num(0.0) for rank in range(RANKS)]
            if fault == "lse_of_block":
                p = torch.stack(of_rank).sum(0)
            else:
                sums = [(d_out * (one @ v)).sum(-1, keepdim=True) for one in of_rank]
                row_sum = torch.stack([sums[rank] for rank in RANK_OF], -2)[..., 0]
        dz = p * (dp - row_sum) / 8**0.5
        dk_of, dv_of = (torch.einsum("bhij,bhie->bhije", w, x) for w, x in ((dz, q), (p, d_out)))  # of each pair
        dk, dv = dk_of.sum(2), dv_of.sum(2)
        if fault in ("own_rows", "own_block"):
            dk, dv = ((one * same[..., None]).sum(2) for one in (dk_of, dv_of))
        if fault == "scale":
            dk, dv = dk / RANKS, dv / RANKS
        if fault == "not_sent":  # the part of row i and key j is added to the key in j's place on the rank of i
            dk, dv = (torch.stack([
                sum((one[:, :, i, j] for i in range(TOKENS) for j in range(TOKENS)
                     if j // RANKS * RANKS + int(RANK_OF[i]) == at), torch.zeros(1))
                for at in range(TOKENS)], 2) for one in (dk_of, dv_of))  # fmt: skip
        if fault == "wrong_rank":
            dk, dv = (one.unflatten(2, (-1, RANKS)).roll(1, 3).flatten(2, 3) for one in (dk, dv))
        dq = (dz * same if fault in ("own_keys", "own_block") else dz) @ k
        return dq, dk, dv, None


class Layer(nn.Module):
    def __init__(self, fault: str | None) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.fault = fault
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (2, 8)).transpose(1, 2) for part in (self.q, self.k, self.v))
        if self.fault is None:
            o = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            o = Flawed.apply(q, k, v, self.fault)
        return x + self.o(o.transpose(1, 2).flatten(2))


def _grads(model: nn.Module, x: Tensor, cotangent: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad((model(x) * cotangent).sum(), parameters)
    return dict(zip(names, found, strict=True))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fault", [
    "own_rows", "scale", "not_sent", "wrong_rank", "lse_cut", "lse_of_block", "own_keys", "own_block",
])  # fmt: skip
def test_a_backward_pass_is_named_by_the_gradients_that_it_gives(fault: str) -> None:
    """Two layers, and the sum over the ranks beside a rank that has nothing."""
    right, flawed = (nn.Sequential(Layer(one), Layer(one)) for one in (None, fault))
    x, cotangent = torch.randn(2, 1, TOKENS, 16)
    alone, grads = (_grads(model, x, cotangent) for model in (right, flawed))
    ranks = [grads, {name: torch.zeros_like(grad) for name, grad in grads.items()}]
    beside = gradients_beside(alone, ranks)
    found = names_of_backward(right, lambda: right(x), {"0": cotangent}, [_places("striped", RANKS)], ranks, beside)
    assert [one.name for one in found] == [fault]
    moved = [{name: grad + 0.01 * torch.randn_like(grad) for name, grad in one.items()} for one in ranks]
    beside = gradients_beside(alone, moved)
    assert not names_of_backward(right, lambda: right(x), {"0": cotangent}, [_places("striped", 2)], moved, beside)

"""The gradients of q and k of a sampled step against those that autograd keeps, however the projection is written."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from sqrtdk.monitor.samples import CallSample
from sqrtdk.monitor.watch import Watch
from tolerances import complaint

HEADS, WIDTH, SIZE = 4, 4, 16
COLUMNS = ("p05", "p50", "p95", "max")


class Block(nn.Module):
    """q, k and v from `projections`, in whose outputs they stand at (which, first feature, features)."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        kv = HEADS // 2 if kind == "gqa" else HEADS
        sizes = {"conv1d": [3 * SIZE], "fused": [3 * SIZE]}.get(kind, [SIZE, kv * WIDTH, kv * WIDTH])
        make: Callable[[int], nn.Module] = (
            (lambda n: Conv1D(n, SIZE)) if kind == "conv1d" else lambda n: nn.Linear(SIZE, n)
        )
        self.projections = nn.ModuleList(make(n) for n in sizes)
        self.out = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        outputs = [project(x) for project in self.projections]
        q, k, v = outputs[0].chunk(3, -1) if len(outputs) == 1 else outputs
        q, k, v = (y.unflatten(-1, (-1, WIDTH)).transpose(1, 2) for y in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kind == "gqa")
        return x + self.out(attended.transpose(1, 2).flatten(2))


class Packed(nn.Module):
    """nn.MultiheadAttention, whose q, k and v no module returns; `weights` are asked for, and so no kernel runs."""

    def __init__(self, weights: bool = False, sequence_first: bool = False) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(SIZE, HEADS, batch_first=not sequence_first)
        self.weights, self.sequence_first = weights, sequence_first

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        y = x.transpose(0, 1) if self.sequence_first else x
        attended, _ = self.attention(y, y, y, attn_mask=hidden, need_weights=self.weights)
        return x + (attended.transpose(0, 1) if self.sequence_first else attended)

    def plain(self) -> Block:
        return as_block(self.attention.in_proj_weight, self.attention.in_proj_bias, self.attention.out_proj)


class Multiplied(nn.Module):
    """q, k and v by matrices of its own, each for itself or all in one."""

    def __init__(self, separate: bool = False) -> None:
        super().__init__()
        self.separate = separate
        self.matrices = nn.ParameterList(
            nn.Parameter(torch.randn(SIZE, n) / SIZE**0.5) for n in ([SIZE] * 3 if separate else [3 * SIZE])
        )
        self.out = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = [x @ each for each in self.matrices] if self.separate else (x @ self.matrices[0]).chunk(3, -1)
        q, k, v = (y.unflatten(-1, (-1, WIDTH)).transpose(1, 2) for y in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(attended.transpose(1, 2).flatten(2))

    def plain(self) -> Block:
        return as_block(torch.cat(list(self.matrices), 1).mT, torch.zeros(3 * SIZE), self.out)


def as_block(weight: Tensor, bias: Tensor, out: nn.Module) -> Block:
    block = Block("fused")
    with torch.no_grad():
        block.projections[0].weight.copy_(weight)
        block.projections[0].bias.copy_(bias)
    block.out = out
    return block


OWN: dict[str, Callable[[], nn.Module]] = {
    "MultiheadAttention": Packed,
    "with weights": lambda: Packed(weights=True),
    "sequence first": lambda: Packed(sequence_first=True),
    "matrix": Multiplied,
    "matrices": lambda: Multiplied(separate=True),
}


class Model(nn.Module):
    """Two blocks, each kept or computed again."""

    def __init__(self, kind: str, reentrant: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OWN[kind]() if kind in OWN else Block(kind) for _ in range(2))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x.square().mean()


def kept(model: Model, batches: list[Tensor], loss_scale: float = 1.0) -> list[dict[str, Tensor]]:
    """The gradients of q and k of each block as autograd keeps them, (heads, rows); without a checkpoint or a watch."""
    plain = copy.deepcopy(model)
    plain.reentrant = None
    plain.blocks = nn.ModuleList(block if isinstance(block, Block) else block.plain() for block in plain.blocks)
    found: list[dict[str, list[Tensor]]] = [{"query": [], "key": []} for _ in plain.blocks]
    for batch in batches:
        outputs: list[list[Tensor]] = [[] for _ in plain.blocks]

        def keep(into: list[Tensor], output: Tensor) -> None:
            output.retain_grad()
            into.append(output)

        for block, into in zip(plain.blocks, outputs, strict=True):
            for project in block.projections:
                project.register_forward_hook(lambda module, args, output, into=into: keep(into, output))
        (plain(batch) * loss_scale).backward()
        for block, into, one in zip(plain.blocks, outputs, found, strict=True):
            for project in block.projections:
                project._forward_hooks.clear()
            gradients = [y.grad for y in into]
            q, k, _ = gradients[0].chunk(3, -1) if len(gradients) == 1 else gradients
            for name, gradient in (("query", q), ("key", k)):
                size = gradient.double().unflatten(-1, (-1, WIDTH)).square().mean(-1).sqrt()
                one[name].append(size.flatten(0, 1).T / loss_scale)
    return [{name: torch.cat(parts, -1) for name, parts in one.items()} for one in found]


def wrong(call: CallSample, gradients: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> list[str]:
    """Complaints about the columns of one attention; keys are told for each head that reads them."""
    found = []
    for name, rows in gradients.items():
        rows = rows.repeat_interleave(HEADS // rows.shape[0], 0)
        wanted = {f"p{q:02d}": rows.quantile(q / 100, -1) for q in (5, 50, 95)} | {"max": rows.amax(-1)}
        for column in COLUMNS:
            got = torch.tensor(call.columns[f"{name}_grad_{column}"], dtype=torch.float64)
            text = complaint(got, wanted[column], dtype, length=SIZE, logit=4.0, magnitude=float(rows.max()))
            found += [] if text is None else [f"{name} {column}: {text}"]
    return found


def watched(model: nn.Module, batches: list[Tensor], **options: Any) -> tuple[CallSample, ...]:
    with Watch(model, every=1, **options) as health:
        for batch in batches:
            model(batch).backward()
        health.step()
    assert health.samples[0].not_measured == ()
    return health.samples[0].calls


@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize("kind", ["separate", "fused", "conv1d", "gqa"])
def test_gradients_are_those_of_autograd(kind: str, reentrant: bool | None) -> None:
    model = Model(kind, reentrant)
    batches = [torch.randn(2, 5, SIZE, requires_grad=True)]  # a re-entrant checkpoint needs an input with a gradient
    calls = watched(model, batches)
    assert [call.index for call in calls] == [0, 0]
    assert [call.columns["rows"][0] for call in calls] == [10.0, 10.0]  # what was computed again is counted once
    for call, gradients in zip(calls, kept(model, batches), strict=True):
        assert wrong(call, gradients) == []


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_of_several_batches_of_one_step_and_of_a_later_step(reentrant: bool | None) -> None:
    model = Model("fused", reentrant)
    batches = [torch.randn(n, 5, SIZE, requires_grad=True) for n in (1, 3, 2)]
    with Watch(model, every=1) as health:
        model(batches[0]).backward()
        health.step()
        for batch in batches:
            model(batch).backward()
        health.step()
    for call, gradients in zip(health.samples[1].calls, kept(model, batches), strict=True):
        assert call.columns["rows"][0] == 30.0
        assert wrong(call, gradients) == []


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_model_that_is_computed_again_as_a_whole(reentrant: bool) -> None:
    model, x = Model("separate"), torch.randn(2, 5, SIZE, requires_grad=True)
    with Watch(model, every=1) as health:
        checkpoint(model, x, use_reentrant=reentrant).backward()
        health.step()
    (sample,) = health.samples
    assert sample.not_measured == ()
    for call, gradients in zip(sample.calls, kept(model, [x]), strict=True):
        assert call.columns["rows"][0] == 10.0
        assert wrong(call, gradients) == []


def one_block_twice(model: Model) -> None:
    model.blocks[1] = model.blocks[0]


def two_blocks_of_one_weight(model: Model) -> None:
    for one, other in zip(model.blocks[0].projections, model.blocks[1].projections, strict=True):
        other.weight, other.bias = one.weight, one.bias


def keys_of_the_weight_of_queries(model: Model) -> None:
    for block in model.blocks:
        block.projections[1].weight = block.projections[0].weight


@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize("share", [one_block_twice, two_blocks_of_one_weight, keys_of_the_weight_of_queries])
def test_calls_that_share_a_weight_have_gradients_of_their_own(
    share: Callable[[Model], None], reentrant: bool | None
) -> None:
    model = Model("separate", reentrant)
    share(model)
    apart = Model("separate")
    apart.blocks = nn.ModuleList(copy.deepcopy(block) for block in model.blocks)
    batches = [torch.randn(n, 5, SIZE, requires_grad=True) for n in (2, 3)]
    with Watch(model, every=1) as health:
        for _ in range(2):
            for batch in batches:
                model(batch).backward()
            health.step()
    unknown = share is one_block_twice and reentrant  # which of its calls a checkpoint computes again
    assert [bool(sample.not_measured) for sample in health.samples] == [bool(unknown), False]
    for sample in health.samples:
        for call, gradients in zip(sample.calls, kept(apart, batches), strict=True):
            if unknown:
                assert "query_grad_max" not in call.columns
            else:
                assert wrong(call, gradients) == []


def test_rows_bounds_the_rows_of_gradients_too() -> None:
    model, x = Model("separate"), torch.randn(2, 9, SIZE)
    calls = watched(model, [x], rows=3)
    chosen = [i + 9 * batch for batch in range(2) for i in (0, 4, 8)]
    for call, gradients in zip(calls, kept(model, [x]), strict=True):
        assert wrong(call, {name: rows[:, chosen] for name, rows in gradients.items()}) == []


@pytest.mark.parametrize("told", [True, False])
def test_a_loss_scale_that_is_told_is_taken_out(told: bool) -> None:
    model, x = Model("separate"), torch.randn(2, 5, SIZE)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Watch(model, every=1, scaler=scaler if told else None) as health:
        scaler.scale(model(x)).backward()
        scaler.step(optimizer)
        scaler.update(2.0)  # the scale of the step is what it was before
        health.step()
    for call, gradients in zip(health.samples[0].calls, kept(model, [x]), strict=True):
        assert wrong(call, gradients if told else {name: 1024.0 * rows for name, rows in gradients.items()}) == []


def test_under_autocast_gradients_are_of_what_the_projection_returned() -> None:
    model, x = Model("separate"), torch.randn(2, 5, SIZE)
    with torch.autocast("cpu", torch.bfloat16):
        calls = watched(model, [x])
        wanted = kept(model, [x])
    for call, gradients in zip(calls, wanted, strict=True):
        assert wrong(call, gradients) == []


def test_without_a_backward_pass_there_are_none() -> None:
    model = Model("separate")
    with Watch(model, every=1) as health:
        with torch.no_grad():
            model(torch.randn(1, 3, SIZE))
        health.step()
    columns = health.samples[0].calls[0].columns
    assert {name for name in columns if "grad" in name} == {"query_grad_nonfinite", "key_grad_nonfinite"}
    assert all(math.isnan(value) for name in columns if "grad" in name for value in columns[name])


class Summed(nn.Module):
    """q is the sum of two projections."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.key = (nn.Linear(SIZE, SIZE) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return ((self.one(x) + self.two(x)) @ self.key(x).mT * 0.25).softmax(-1) @ x


def test_what_no_one_projection_gives_is_told_once() -> None:
    model = Summed()
    with Watch(model, every=1) as health:
        for _ in range(2):
            model(torch.randn(1, 3, SIZE)).sum().backward()
            health.step()
    first, second = health.samples
    assert any("no gradients of query: " in reason for reason in first.not_measured)
    assert second.not_measured == ()
    assert "key_grad_max" in second.calls[0].columns
    assert "query_grad_max" not in second.calls[0].columns


def test_gradients_that_do_not_come_are_told_once() -> None:
    model = Model("matrix")
    model.blocks[0].matrices[0].requires_grad_(False)
    with Watch(model, every=1) as health:
        for _ in range(2):
            model(torch.randn(1, 3, SIZE)).backward()
            health.step()
    first, second = health.samples
    assert first.not_measured == tuple(
        f"blocks.0: no gradients of {name} came; is it frozen?" for name in ("key", "query")
    )
    assert second.not_measured == ()
    assert "query_grad_max" in second.calls[1].columns


@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize("kind", OWN)
def test_gradients_of_what_no_module_returns(kind: str, reentrant: bool | None) -> None:
    model = Model(kind, reentrant)
    batches = [torch.randn(n, 5, SIZE, requires_grad=True) for n in (2, 3)]
    with Watch(model, every=1) as health:
        model(batches[0]).backward()
        health.step()
        for batch in batches:
            model(batch).backward()
        health.step()
    assert [sample.not_measured for sample in health.samples] == [(), ()]
    for sample, of_step in zip(health.samples, (batches[:1], batches), strict=True):
        for call, gradients in zip(sample.calls, kept(model, of_step), strict=True):
            assert call.columns["rows"][0] == 5.0 * sum(map(len, of_step))
            assert wrong(call, gradients) == []


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_model_of_weights_that_is_computed_again_as_a_whole(reentrant: bool) -> None:
    model, x = Model("MultiheadAttention"), torch.randn(2, 5, SIZE, requires_grad=True)
    with Watch(model, every=1) as health:
        for _ in range(2):
            checkpoint(model, x, use_reentrant=reentrant).backward()
            health.step()
    for call, gradients in zip(health.samples[1].calls, kept(model, [x]), strict=True):
        assert wrong(call, gradients) == []


@pytest.mark.parametrize("kind", ["MultiheadAttention", "matrix"])
def test_a_backward_pass_in_a_thread_of_its_own(kind: str) -> None:
    """As that of an accelerator is."""
    model, x = Model(kind, reentrant=True), torch.randn(2, 5, SIZE, requires_grad=True)
    with Watch(model, every=1) as health:
        for _ in range(2):
            thread = threading.Thread(target=model(x).backward)
            thread.start()
            thread.join()
            health.step()
    for call, gradients in zip(health.samples[1].calls, kept(model, [x]), strict=True):
        assert wrong(call, gradients) == []


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_weights_under_autocast(reentrant: bool | None) -> None:
    model, x = Model("MultiheadAttention", reentrant), torch.randn(2, 5, SIZE, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        with Watch(model, every=1) as health:
            for _ in range(2):
                model(x).backward()
                health.step()
        wanted = kept(model, [x])
    for sample in health.samples:
        for call, gradients in zip(sample.calls, wanted, strict=True):
            assert wrong(call, gradients, torch.bfloat16) == []


def test_queries_and_keys_of_unlike_inputs_share_one_weight() -> None:
    layer, x, y = nn.MultiheadAttention(SIZE, HEADS, batch_first=True), torch.randn(2, 5, SIZE), torch.randn(2, 7, SIZE)
    with Watch(layer, every=1) as health:
        for _ in range(2):
            layer(x, y, y, need_weights=False)[0].square().mean().backward()
            health.step()
    q, k, v = (
        F.linear(each, weight, bias).detach().requires_grad_()
        for each, weight, bias in zip(
            (x, y, y), layer.in_proj_weight.chunk(3), layer.in_proj_bias.chunk(3), strict=True
        )
    )
    heads = (each.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for each in (q, k, v))
    layer.out_proj(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)).square().mean().backward()
    wanted = {
        name: each.grad.double().unflatten(-1, (HEADS, WIDTH)).square().mean(-1).sqrt().flatten(0, 1).T
        for name, each in (("query", q), ("key", k))
    }
    assert wrong(health.samples[1].calls[0], wanted) == []


def test_rows_bounds_the_rows_of_gradients_that_no_module_returns() -> None:
    model, x = Model("matrix"), torch.randn(2, 9, SIZE)
    with Watch(model, every=1, rows=3) as health:
        for _ in range(2):
            model(x).backward()
            health.step()
    chosen = torch.linspace(0, 17, 6).round().long()
    for call, gradients in zip(health.samples[1].calls, kept(model, [x]), strict=True):
        assert wrong(call, {name: rows[:, chosen] for name, rows in gradients.items()}) == []


def test_gradients_of_what_is_written_over_afterwards_are_of_what_was_there() -> None:
    class Scaled(Multiplied):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (x @ each for each in self.matrices)
            q.mul_(2.0)
            q, k, v = (y.unflatten(-1, (-1, WIDTH)).transpose(1, 2) for y in (q, k, v))
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.25)
            return (x + self.out(attended.transpose(1, 2).flatten(2))).square().mean()

    model, x = Scaled(separate=True), torch.randn(2, 5, SIZE)
    with Watch(model, every=1) as health:
        for _ in range(2):
            model(x).backward()
            health.step()
    plain = Model("matrices")
    plain.blocks = nn.ModuleList([model])
    assert wrong(health.samples[1].calls[0], kept(plain, [x])[0]) == []


def test_a_projection_that_is_called_by_itself_does_not_count() -> None:
    model, x = Model("separate"), torch.randn(2, 5, SIZE)
    with Watch(model, every=1) as health:
        model(x).backward()
        model.blocks[0].projections[0](10 * x).square().sum().backward()
        health.step()
    assert wrong(health.samples[0].calls[0], kept(model, [x])[0]) == []


def test_an_attention_that_comes_later_has_gradients_from_its_next_step_on() -> None:
    model, x = Model("separate"), torch.randn(2, 5, SIZE)
    second = model.blocks.pop(1)
    with Watch(model, every=1) as health:
        for step in range(3):
            if step == 1:
                model.blocks.append(second)
            model(x).backward()
            health.step()
    assert [len(sample.calls) for sample in health.samples] == [1, 2, 2]
    assert wrong(health.samples[2].calls[1], kept(model, [x])[1]) == []


class Turns(nn.Module):
    """One of two attentions a forward pass, in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block("separate") for _ in range(2))
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        block = self.blocks[self.passes % 2]
        self.passes += 1
        return block(x).square().mean()


def test_attentions_that_take_turns_within_a_step_all_have_gradients() -> None:
    model = Turns()
    with Watch(model, every=1) as health:
        for _ in range(3):
            for _ in range(2):
                model(torch.randn(2, 5, SIZE)).backward()
            health.step()
    assert [call.site for call in health.samples[2].calls] == ["blocks.0", "blocks.1"]
    assert all(max(call.columns["query_grad_max"]) > 0 for call in health.samples[2].calls)

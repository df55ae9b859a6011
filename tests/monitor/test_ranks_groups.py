"""Which processes watch together, and how what they saw becomes one; of one process, or by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.monitor.packed import HEAD, Head, pack_step, unpack_step
from sqrtdk.monitor.ranks import ranks_of
from sqrtdk.monitor.reading import read_run
from sqrtdk.monitor.samples import not_measured
from sqrtdk.monitor.shards import RankAxis, join_ranks
from sqrtdk.monitor.sums import WatchedCall, WatchedStep, head_sums
from sqrtdk.monitor.watch import watch
from sqrtdk.stats import row_stats
from sqrtdk.tracing.tensors import CallRows
from sqrtdk.tracing.trace import Trace
from tests.monitor import ranks_models as models


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def call(logits: torch.Tensor, visible: torch.Tensor | None = None, **changes: Any) -> WatchedCall:
    """Of logits (Hq, n, keys)."""
    rows = CallRows(row_stats(logits, visible), logits.abs().amax(), logits.shape[1])
    found = WatchedCall("layers.0", 0, logits.shape[0], 1.0, "softmax(q.k)", head_sums(rows), None, (rows,))
    return replace(found, **changes)


def step(*calls: WatchedCall, how: str = "as is", missed: tuple[str, ...] = ()) -> WatchedStep:
    return WatchedStep(calls, how, missed)


def reasons(steps: list[WatchedStep], shards: str) -> list[str | None]:
    found = join_ranks(steps, [RankAxis(len(steps), shards)])
    assert all((one.sums is None) == (one.reason is not None) for one in found.calls)
    return [one.reason for one in found.calls]


def test_without_torch_distributed_and_alone_there_are_no_ranks(group: None) -> None:
    assert ranks_of() is None
    assert ranks_of(shards="alone") is None
    dist.destroy_process_group()
    assert ranks_of(shards="keys") is None
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_what_is_no_group_and_what_is_no_word_is_refused(group: None) -> None:
    with pytest.raises(InvalidTypeError, match="got str"):
        ranks_of("world")
    with pytest.raises(InvalidValueError, match="got 'batches'"):
        ranks_of(shards="batches")
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "experts"))
    with pytest.raises(InvalidValueError, match="axis 'experts'"):
        ranks_of(mesh)
    ranks = ranks_of(mesh, {"experts": "same"})
    assert ranks is not None
    assert [axis.shards for axis in ranks.axes] == ["rows", "same"]


def test_a_mesh_knows_its_axes_by_the_names_of_torchtitan(group: None) -> None:
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    ranks = ranks_of(init_device_mesh("cpu", (1,) * 5, mesh_dim_names=names))
    assert ranks is not None
    assert [axis.shards for axis in ranks.axes] == ["stages", "rows", "rows", "rows", "heads"]


def test_a_row_of_bytes_is_the_step_again() -> None:
    logits = torch.randn(2, 5, 3, dtype=torch.float64)
    before = step(
        call(logits), call(logits[:, :1], site="b", ratio=None), call(logits, site="c", sums=None, reason="?")
    )
    for by_row in (False, True):
        row = pack_step(replace(before, loss=2.5), by_row=by_row, most=1 << 20)
        flat = row.bytes(int(row.head.needed) + 16, torch.device("cpu"))
        head = Head(*flat[:HEAD].view(torch.float64).tolist())
        after = unpack_step(flat, row.layout, head, 1)
        assert after.loss == 2.5
        assert [(one.site, one.ratio, one.reason) for one in after.calls] == [
            ("layers.0", 1.0, None),
            ("b", None, None),
            ("c", 1.0, "?"),
        ]
        found = join_ranks([after], [RankAxis(1, "keys" if by_row else "rows")]).samples()
        assert repr(found) == repr(before.samples())


def test_what_does_not_fit_is_a_head_alone() -> None:
    row = pack_step(step(call(torch.randn(2, 5, 3))), by_row=False, most=1 << 20)
    flat = row.bytes(HEAD, torch.device("cpu"))
    assert Head(*flat.view(torch.float64).tolist()).needed == row.head.needed > len(flat)


def test_what_one_rank_could_not_measure_no_rank_has_measured() -> None:
    logits = torch.randn(2, 5, 3)
    lost = call(logits, sums=None, reason="no data")
    for shards in ("rows", "heads", "keys"):
        assert reasons([step(call(logits)), step(lost)], shards) == ["no data"]


def test_a_rank_that_is_absent_lacks_rows_but_not_heads_or_keys() -> None:
    seen = step(call(torch.randn(2, 5, 3)))
    assert reasons([seen, step()], "rows") == [None]
    assert reasons([seen, step()], "heads") == ["1 of 2 ranks that share its heads saw no call"]
    assert reasons([step(), seen], "keys") == ["1 of 2 ranks that share its keys saw no call"]


def test_ranks_that_do_not_fit_together_are_told() -> None:
    two, four, longer = (step(call(torch.randn(heads, n, 3))) for heads, n in ((2, 5), (4, 5), (2, 6)))
    assert reasons([two, four], "rows") == ["ranks have 2 and 4 heads: pass which of them share rows, which heads"]
    assert reasons([two, longer], "heads") == ["ranks that share heads have other rows"]
    assert reasons([two, longer], "keys") == ["ranks that share keys have other rows"]
    assert reasons([two, longer], "rows") == [None]


def test_keys_are_joined_before_heads_and_heads_before_rows() -> None:
    logits = torch.randn(4, 6, 8, dtype=torch.float64)
    whole = join_ranks([step(call(logits))], [RankAxis(1, "rows")]).samples()[0]
    parts = [
        step(call(part.contiguous()))
        for by_key in logits.tensor_split(2, 2)
        for by_row in by_key.tensor_split(2, 1)
        for part in by_row.tensor_split(2, 0)
    ]
    found = join_ranks(parts, [RankAxis(2, "keys"), RankAxis(2, "rows"), RankAxis(2, "heads")]).samples()[0]
    assert found.heads == 4
    for name, column in whole.columns.items():
        if name != "max_product":  # of parts of the logits it was told for each
            assert found.columns[name] == pytest.approx(column, rel=1e-6, nan_ok=True), name


@pytest.mark.parametrize("shards", ["rows", "summed"])
def test_gradients_of_ranks_are_those_of_the_loss_of_all(shards: str) -> None:
    """A mean over the tokens of all ranks: by ranks whose means are averaged, or that sum up their parts of it."""
    query, key = torch.randn(2, 6, 4, requires_grad=True), torch.randn(2, 8, 4)

    def seen(parts: int, rank: int) -> WatchedStep:
        q = query.tensor_split(parts, 1)[rank].detach().requires_grad_()
        logits = q @ key.mT
        tokens = q.shape[1] if shards == "rows" else query.shape[1]
        (logits.softmax(-1).square().sum() / tokens).backward()
        assert q.grad is not None
        one = call(logits.detach())
        assert one.sums is not None
        sizes = q.grad.norm(dim=-1) / q.shape[-1] ** 0.5
        return step(replace(one, sums=one.sums.with_gradients(sizes, None)))

    (whole,) = join_ranks([seen(1, 0)], [RankAxis(1, "rows")]).samples()
    (found,) = join_ranks([seen(3, rank) for rank in range(3)], [RankAxis(3, shards)]).samples()
    for name in ("query_grad_max", "query_grad_p50"):
        assert found.columns[name] == pytest.approx(whole.columns[name], rel=1e-5)  # float32


def test_what_a_rank_missed_is_told_with_its_number() -> None:
    steps = [step(missed=("a", "b")), step(missed=("b",), how="eager")]
    found = join_ranks(steps, [RankAxis(2, "rows")])
    assert found.missed == ("rank 0: a", "b")
    assert join_ranks([step(how=not_measured("x")), steps[1]], [RankAxis(2, "rows")]).how == "eager"


def test_weights_of_tensor_parallel_layers_have_their_names(group: None) -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp_shard", "tp"))
    parallel = [models.by_heads(models.decoder(), mesh["tp"]) for _ in range(2)]
    for model in (parallel[0], models.sharded(parallel[1], mesh["dp_shard"])):
        with Trace(model, stats=False, keep=True) as trace, torch.no_grad():
            model(models.batch())
        for at, kept in enumerate(trace.tensors):
            for name, one in (("q_proj", kept.query), ("k_proj", kept.key), ("v_proj", kept.value)):
                assert one.projection is not None
                assert one.projection.name == f"layers.{at}.{name}.weight"
                assert torch.equal(
                    one.projection.weight.flatten(0, 1), getattr(models.decoder().layers[at], name).weight
                )
        assert trace.unread == frozenset()
        assert trace.not_measured == ()


@pytest.mark.slow
def test_a_ring_of_sequences_is_told_as_what_it_is(group: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    q, k, v = (distribute_tensor(torch.randn(1, 2, 4, 8), mesh, [Shard(2)]) for _ in range(3))
    with Trace() as trace, torch.no_grad():
        torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert trace.calls == ()
    assert "torch's context_parallel" in trace.not_measured[0].reason


def test_calls_of_one_sharded_weight_have_no_gradients_which_is_told(group: None) -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    model = models.by_heads(models.decoder(), mesh)
    model.layers[1] = model.layers[0]
    with watch(model, every=1, group=mesh) as health:
        for _ in range(2):
            model(models.batch()).sum().backward()
            health.step()
    first, second = health.samples
    assert [call.columns.get("query_grad_max") for call in first.calls] == [None, None]
    assert sum("several calls of one sharded weight" in text for text in first.not_measured) == 2
    assert second.not_measured == ()


def test_a_copied_model_has_the_names_of_the_model_itself(group: None, tmp_path: Path) -> None:
    """So its records go on where another number of processes ended."""
    model = models.decoder()
    for one in (nn.parallel.DistributedDataParallel(model), model, torch.compile(model, backend="eager")):
        with torch.no_grad(), watch(one, every=1, to=tmp_path / "run") as health:
            one(models.batch())
            health.step()
        assert [call.site for call in health.samples[0].calls] == ["layers.0", "layers.1"]
    assert read_run(tmp_path / "run").last_step == 3


def test_parameters_keep_their_names_where_fsdp_puts_them_together(group: None) -> None:
    model = models.sharded(models.decoder())
    with Trace(model, stats=False, projections=True) as trace, torch.no_grad():
        model(models.batch())
    names = [[one.name for one in pair if one is not None] for pair in trace.projections]
    assert names == [[f"layers.{at}.{name}.weight" for name in ("q_proj", "k_proj")] for at in (0, 1)]
    assert trace.unread == frozenset()
    assert [one.scale.ratio for one in trace.calls] == [pytest.approx(1.0, rel=1e-12)] * 2

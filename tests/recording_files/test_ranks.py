"""Trace files of ranks, put together by declared places: a fault of one rank is named, and gaps are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import sqrtdk
from sqrtdk.errors import InvalidValueError, TraceFileError
from sqrtdk.recording import Shard, read_trace_file, write_trace_file
from sqrtdk.recording.ranks import read_files_of_ranks
from sqrtdk.tracing.tensors import CallTensors, Term, Vector
from tests.monitor import ranks_at_work
from tests.monitor import ranks_models as models
from tests.recording_files import recorded_ranks as work
from tests.support.once import made_once
from tests.support.two_ranks import two_ranks as two_ranks
from tests.tolerances import allowed

COUNTS = [2, pytest.param(4, marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=COUNTS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of ranks, by way."""
    if request.param == 2:
        return request.getfixturevalue("two_ranks") / "files"
    return made_once(tmp_path_factory, "files-of-four", lambda path: ranks_at_work.run(work.work_of, 4, path))


def compared(folder: Path, name: str) -> Any:
    """One process against the files of all ranks, on the inputs of the whole."""
    whole = {"x": models.batch(2, work.LENGTH)}
    return sqrtdk.diff(models.meeting(models.plainly), folder / f"{name}-rank*.safetensors", whole)


@pytest.mark.parametrize("name", ["right", pytest.param("zigzag", marks=pytest.mark.full), "heads"])
def test_ranks_that_are_one_model_are_the_same(folder: Path, name: str) -> None:
    report = compared(folder, name)
    assert report.same is True, report.paragraphs
    assert [pair.same for pair in report.pairs] == [True, True]
    joined = read_files_of_ranks(folder / f"{name}-rank*.safetensors")
    with sqrtdk.trace(model := models.meeting(models.plainly), keep=True) as run, torch.no_grad():
        model(models.batch(2, work.LENGTH))
    for one, other in zip(run.tensors, joined.file.calls, strict=True):
        for part in ("query", "key", "value"):
            size = float(getattr(one, part).values.abs().max())
            limit = allowed(torch.float64, length=models.WIDTH, logit=1.0, magnitude=size)
            torch.testing.assert_close(getattr(other, part).values, getattr(one, part).values, atol=4 * limit, rtol=0.0)


@pytest.mark.parametrize(
    ("fault", "cause"), [("mask", "mask"), pytest.param("scale", "length_factor", marks=pytest.mark.full)]
)
def test_a_fault_of_one_rank_is_named_with_the_rank(folder: Path, fault: str, cause: str) -> None:
    report = compared(folder, fault)
    assert report.same is False
    assert [one.name for one in report.pairs[0].causes] == [cause]
    last = len(list(folder.glob(f"{fault}-rank*"))) - 1
    notes = [str(note) for note in report.environment["notes"]]
    assert any(f"of {fault}-rank{last}.safetensors alone" in note for note in notes)
    unlike = [note for note in notes if "unlike scale" in note]
    assert bool(unlike) is (fault == "scale")
    assert all(f"0.125 on {fault}-rank{last}" in note for note in unlike)


def test_copies_that_differ_are_refused_with_their_ranks(folder: Path) -> None:
    with pytest.raises(
        TraceFileError, match=r"values-rank0.safetensors and values-rank\d.safetensors both hold a part"
    ):
        compared(folder, "values")


# -- files that other programs write: a ring with own keys alone -------------------------------------------------------


def whole_call() -> CallTensors:
    made = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 6, 4, generator=made) for heads in (4, 2, 2))
    mask = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    output = sqrtdk.attention(q, k, v, attn_mask=mask, scale=0.5, enable_gqa=True)
    terms = (Term("scale", 0.5), Term("mask", mask, "causal"))
    return CallTensors("layers.0.attn", 0, Vector(q), Vector(k), Vector(v), output, terms)


def part_of(call: CallTensors, places: list[int]) -> CallTensors:
    """The rows and keys of one rank of a ring."""

    def cut(tensor: Tensor) -> Tensor:
        return tensor[:, :, places]

    vectors = {name: Vector(cut(getattr(call, name).values)) for name in ("query", "key", "value")}
    assert call.terms is not None
    mask = call.terms[1].value
    assert isinstance(mask, Tensor)
    terms = (call.terms[0], replace(call.terms[1], value=mask[:, :, places][..., places]))
    return replace(call, **vectors, output=cut(call.output), terms=terms)


def ring_shard(start: int, stop: int, of: int = 6) -> Shard:
    return Shard(rows=((start, stop),), rows_of=of, keys=((start, stop),), keys_of=of)


def write_ring(folder: Path, shards: list[Shard | None], sites: tuple[str, ...] = ()) -> Path:
    """The files of a ring whose ranks have the rows and keys that `shards` say, or none."""
    for rank, shard in enumerate(shards):
        places = [0, 1, 2] if rank == 0 else [3, 4, 5]
        call = part_of(whole_call(), places)
        call = replace(call, site=sites[rank]) if sites else call
        write_trace_file(folder / f"rank{rank}.safetensors", [call], shards=[shard])
    return folder / "rank*.safetensors"


def test_a_ring_is_put_together_from_own_keys_and_bounds(tmp_path: Path) -> None:
    pattern = write_ring(tmp_path, [ring_shard(0, 3), ring_shard(3, 6)])
    whole, joined = whole_call(), read_files_of_ranks(pattern).file.calls[0]
    for name in ("query", "key", "value"):
        assert torch.equal(getattr(joined, name).values, getattr(whole, name).values)
    assert torch.equal(joined.output, whole.output)
    assert joined.terms is not None
    assert whole.terms is not None
    assert torch.equal(joined.terms[1].value, whole.terms[1].value)  # causal over all, from the bounds of each


def test_a_file_without_shards_stays_of_version_1_and_one_with_them_is_of_version_2(tmp_path: Path) -> None:
    write_trace_file(tmp_path / "one.safetensors", [whole_call()])
    assert read_trace_file(tmp_path / "one.safetensors").schema_version == 1
    write_ring(tmp_path, [ring_shard(0, 3), ring_shard(3, 6)])
    file = read_trace_file(tmp_path / "rank1.safetensors")
    assert (file.schema_version, file.shards) == (2, (ring_shard(3, 6),))
    whole = whole_call()
    assert whole.terms is not None
    assert file.calls[0].terms is not None
    assert torch.equal(file.calls[0].terms[1].value, part_of(whole, [3, 4, 5]).terms[1].value)  # type: ignore[index]


WRONG: dict[str, tuple[list[Shard | None], tuple[str, ...], str]] = {
    "none": ([ring_shard(0, 3), None], (), "rank1.safetensors does not say which rows"),
    "overlap": ([ring_shard(0, 3), ring_shard(2, 5)], (), "both hold a part of query"),
    "gap": ([ring_shard(0, 3, 7), ring_shard(3, 6, 7)], (), "no file holds row 6"),
    "huge": ([ring_shard(0, 3, 2**39), ring_shard(3, 6, 2**39)], (), "no file holds row 6"),
    "unlike": ([ring_shard(0, 3), ring_shard(3, 6, 7)], (), "do not fit at 'layers.0.attn'"),
    "sites": ([ring_shard(0, 3), ring_shard(3, 6)], ("a", "b"), "has the attention 'a', index 0, and rank1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_places_are_one_clear_error(tmp_path: Path, name: str) -> None:
    shards, sites, says = WRONG[name]
    with pytest.raises(TraceFileError, match=says):
        read_files_of_ranks(write_ring(tmp_path, shards, sites))


@pytest.mark.parametrize(
    ("shard", "says"),
    [
        (Shard(rows=((0, 2),), rows_of=6), "are not the 3 of its tensors"),
        (Shard(rows=((0, 3),)), "without 'rows_of'"),
        (Shard(rows=((4, 7),), rows_of=6), "are no range"),
        (Shard(rows=((0, 2), (1, 2)), rows_of=6), "name a place twice"),
    ],
)
def test_a_shard_that_does_not_fit_its_tensors_is_never_written(tmp_path: Path, shard: Shard, says: str) -> None:
    with pytest.raises(TraceFileError, match=says):
        write_trace_file(tmp_path / "a.safetensors", [part_of(whole_call(), [0, 1, 2])], shards=[shard])
    assert not list(tmp_path.iterdir())


def test_no_file_and_a_cut_of_a_shard_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceFileError, match="no file is named"):
        read_files_of_ranks(tmp_path / "rank*.safetensors")
    with pytest.raises(InvalidValueError, match="a shard of ranks is written whole"):
        sqrtdk.record("demo", None, tmp_path / "a.safetensors", rows=2, shard=Shard(rows=((0, 2),), rows_of=4))

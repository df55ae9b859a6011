"""The search for what a file does not tell ends by the work that it takes, and says what it did not try."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sqrtdk import diff
from sqrtdk.compare import diff as comparing
from sqrtdk.compare.infer.evidence import FITTED, TWOFOLD, Recorded, SearchWork
from sqrtdk.compare.infer.formula import infer_formula
from sqrtdk.compare.infer.rows import formulas_from_rows
from sqrtdk.compare.infer.used import compare_used
from sqrtdk.compare.inside.call_numbers import observe
from sqrtdk.compare.inside.program import Formula
from sqrtdk.errors import InvalidValueError
from sqrtdk.recording import read, write_trace_file
from sqrtdk.tracing.tensors import CallTensors, Vector
from tests.recording_files.forged import forge


def _noise(path: Path, seed: int, length: int, calls: int = 1) -> Path:
    """A file whose output is no attention of its q, k and v."""
    made = torch.Generator().manual_seed(seed)
    every = [[torch.randn(1, 2, length, 8, generator=made) for _ in range(4)] for _ in range(calls)]
    tensors = [
        CallTensors(f"layers.{n}", 0, Vector(q), Vector(k), Vector(v), o, None) for n, (q, k, v, o) in enumerate(every)
    ]
    write_trace_file(path, tensors)
    return path


def test_noise_ends_the_search_and_says_what_was_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every candidate is tried on noise, and the intervals of keys grow with the square of the keys."""
    works: list[SearchWork] = []

    def bounded(most: float) -> SearchWork:
        works.append(SearchWork(2.0**24))
        return works[-1]

    monkeypatch.setattr(comparing, "SearchWork", bounded)
    report = diff(*(_noise(tmp_path / f"{seed}.safetensors", seed, 160, calls=2) for seed in (0, 1)))
    assert len(works) == 1
    assert 2**22 < works[0].taken <= 2**24  # all calls together
    assert "the masks and sinks that the rows show" in str(report.pairs[0].reason)
    for pair in report.pairs:
        assert pair.same is None
        assert "its search ended after" in str(pair.reason)


def test_memory_of_the_rows_does_not_grow_with_the_formulas() -> None:
    q, k, v, output = torch.randn(4, 1, 1, 200, 4)
    work = SearchWork(2.0**24)
    found = list(formulas_from_rows(Recorded(q, k, v, output, None), [Formula(0.5)] * 200, masked=False, sunk=True,
                                    work=work))  # fmt: skip
    assert found
    assert work.taken < 2**24
    assert work.ended is not None  # ranking took its half; the masks of the best were looked for


def test_keys_beyond_the_rows_limit_are_said() -> None:
    q, k, v, output = torch.randn(4, 1, 1, 1030, 2)
    work = SearchWork()
    list(formulas_from_rows(Recorded(q, k, v, output, None), [Formula(0.5)], masked=False, sunk=True, work=work))
    assert work.ended is not None
    assert "rows show" in work.ended


def test_what_a_search_found_costs_the_next_one_nothing() -> None:
    whole = SearchWork(2.0**20)
    vain, good = whole.part(), whole.part()
    assert vain.takes(2**18, FITTED)
    assert not vain.takes(2**19, TWOFOLD)
    assert good.takes(2**17, FITTED)
    good.found()
    good.found()
    assert whole.left == 2**20 - 2**18
    assert whole.part(vain).ended is not None
    assert "two changes" in str(whole.part(vain).ended)


def test_without_work_the_known_formulas_are_still_tried() -> None:
    q, k, v = torch.randn(3, 1, 2, 12, 16)
    output = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    call = Recorded(q, k, v, output, None)
    assert infer_formula(call, Formula(0.25), work=SearchWork(0)) is not None
    assert infer_formula(call, Formula(1.0), Formula(0.25), work=SearchWork(0)) is not None
    missed = SearchWork(0)
    assert infer_formula(call, Formula(1.0), work=missed) is None
    assert missed.ended is not None


def test_distances_of_many_features_are_left_out() -> None:
    """1024 heads of 16 in a file of one megabyte: all distances of features, and their projections, take 2 GiB."""
    work = SearchWork(2.0**26)
    assert compare_used(torch.randn(1, 1024, 4, 16), torch.randn(1, 1024, 4, 16), work=work) is None
    assert work.taken == 0
    assert work.ended is not None
    x = torch.randn(1, 4, 6, 8)
    permuted = compare_used(x, x[..., [1, 0, 3, 2, 5, 4, 7, 6]], work=SearchWork(2.0**26))
    assert permuted is not None


def test_equal_heads_are_found_by_their_sums() -> None:
    k = torch.randn(1, 2, 5, 4).repeat_interleave(3, 1)
    k[0, 5, 0, 0] = float("nan")
    one = Vector(k)
    heads = observe(CallTensors("a", 0, one, one, one, k, None))["key"].heads
    assert heads.tolist() == [0, 0, 0, 1, 1, 2]


def test_files_of_other_shapes_are_refused_before_their_values_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def files(width: int, rows: int) -> list[Path]:
        a = forge(tmp_path / "a.safetensors")
        of = {"q": [1, 2, rows, width], "output": [1, 2, rows, 6], "k": [1, 1, 5, width], "v": [1, 1, 5, 6]}
        other = {f"calls.0.{name}": ("F32", shape) for name, shape in of.items()}
        return [a, forge(tmp_path / "b.safetensors", other)]

    def unread(*_: object) -> None:
        raise AssertionError("a value was read")

    monkeypatch.setattr(read, "read_tensor", unread)
    with pytest.raises(InvalidValueError, match="no attention of A belongs to one of B"):
        diff(*files(4, 7))
    with pytest.raises(InvalidValueError, match="no attention of A has the shapes of its partner"):
        diff(*files(8, 3))
    with pytest.raises(Exception, match="a value was read"):
        diff(*files(4, 3))


def test_a_file_is_told_what_it_could_tell(tmp_path: Path) -> None:
    """A rotation of no usual law leads to q: only q before it could show that."""
    q, k, v = torch.randn(3, 1, 2, 16, 8)
    angle = torch.rand(16, 4) * 6
    turn = torch.polar(torch.ones_like(angle), angle)
    turned = torch.view_as_real(torch.view_as_complex(q.view(1, 2, 16, 4, 2)) * turn).reshape(q.shape)
    for name, query in (("a", q), ("b", turned)):
        output = torch.nn.functional.scaled_dot_product_attention(query, k, v)
        call = CallTensors("layers.0", 0, Vector(query), Vector(k), Vector(v), output, None)
        write_trace_file(tmp_path / f"{name}.safetensors", [call])
    report = diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert [cause.name for cause in report.pairs[0].causes] == ["unknown"]
    hint = "To have that judged, add `q.projected` and `steps` to the trace file of A and B"
    assert any(str(paragraph).startswith(hint) for paragraph in report.paragraphs)

"""Files as engines write them: fewer heads of k than of q, no lse, half precision, one layer, few rows, a cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sqrtdk.compare.diff import diff
from sqrtdk.compare.records import DiffReport, PairDiff
from tests.compare.engine_files import Engine, Sizes, calls_of, engine_file, hooked, vectors
from tests.compare.ports.built import build, inputs
from tests.compare.ports.pairs import case_of

CAUSAL, SINKS = Engine(), (1.0, -2.0, 0.5, 0.0, 2.0, -1.0, 0.3, 1.5)
SAYS: dict[str, tuple[Engine, list[tuple[str, object, object]]]] = {
    "no scale": (Engine(scale=1.0), [("scale", 0.176777, 1.0)]),
    "a scale of nobody's": (Engine(scale=0.1337), [("scale", 0.176777, 0.1337)]),
    "a softcap": (Engine(softcap=3.0), [("softcap", None, 3.0)]),
    "one key late": (Engine(least=1), [("mask_offset", 0, 1)]),
    "every key": (Engine(least=None), [("mask_offset", 0, "none")]),
    "a window": (Engine(greatest=15), [("window", "none", 16)]),
    "padding": (Engine(padding=(0, 5)), [("padding", "none", "the last 5")]),
    "sinks": (Engine(sinks=SINKS), [("sinks", None, "-2 to 2 by head")]),
    "groups in turn": (Engine(turn=True), [("group_order", "0 0 0 0 1 1 1 1", "0 1 0 1 0 1 0 1")]),
    "no scale, a window": (Engine(scale=1.0, greatest=20), [("scale", 0.176777, 1.0), ("window", "none", 21)]),
    "a softcap, a window": (Engine(softcap=2.0, greatest=20), [("softcap", None, 2.0), ("window", "none", 21)]),
}  # fmt: skip
SHOWN = ("no scale", "one key late", "a window", "groups in turn", "sinks")


def told(pair: PairDiff) -> list[tuple[str, object, object]]:
    return sorted((cause.name, cause.a, cause.b) for cause in pair.causes)


def two_files(folder: Path, b: Engine, sizes: Sizes, *, lse: bool = False, a: Engine = CAUSAL) -> DiffReport:
    parts = vectors(sizes)
    files = [engine_file(folder / f"{i}", [(engine, parts)], lse=lse) for i, engine in enumerate((a, b))]
    return diff(*(path.rename(path.with_suffix(".safetensors")) for path in files))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SAYS)
def test_two_files_without_a_formula(name: str, tmp_path: Path) -> None:
    engine, expected = SAYS[name]
    report = two_files(tmp_path, engine, Sizes(batch=2 if engine.padding else 1))
    assert (report.same, told(report.pairs[0])) == (False, expected)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SAYS)
def test_two_files_with_one_mistake_are_the_same(name: str, tmp_path: Path) -> None:
    engine = SAYS[name][0]
    parts = [vectors(Sizes(batch=2 if engine.padding else 1))] * 2
    files = [engine_file(tmp_path / f"{i}.safetensors", [(engine, one)]) for i, one in enumerate(parts)]
    assert (diff(*files).same, diff(*files).pairs[0].causes) == (True, ())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SHOWN)
def test_files_with_an_lse(name: str, tmp_path: Path) -> None:
    engine, expected = SAYS[name]
    assert told(two_files(tmp_path, engine, Sizes(), lse=True).pairs[0]) == expected


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", SHOWN)
def test_files_in_half_precision(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    engine, expected = SAYS[name]
    pair = two_files(tmp_path, engine, Sizes(dtype=dtype)).pairs[0]
    if name != "sinks":
        assert told(pair) == expected
    assert [cause.name for cause in pair.causes] == [cause for cause, _, _ in expected]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SHOWN)
def test_files_of_a_prefill_behind_a_cache(name: str, tmp_path: Path) -> None:
    """Sixteen rows at the end of sixty-four keys: i - j counts from the first row."""
    engine, expected = SAYS[name]
    at = {"one key late": [("mask_offset", -48, -47)]}
    assert told(two_files(tmp_path, engine, Sizes(rows=16)).pairs[0]) == at.get(name, expected)


def test_what_the_call_before_had_is_tried_first(tmp_path: Path) -> None:
    """Every layer has the same softcap, which no list has: it is fitted in the first, and tried in the others."""
    layers = [vectors(Sizes(), seed) for seed in range(3)]
    b = [(Engine(softcap=2.7, greatest=9), parts) for parts in layers]
    a = [(CAUSAL, parts) for parts in layers]
    report = diff(engine_file(tmp_path / "a.safetensors", a), engine_file(tmp_path / "b.safetensors", b))
    assert [sorted(cause.name for cause in pair.causes) for pair in report.pairs] == [["softcap", "window"]] * 3


@pytest.mark.parametrize("scale", [32**-0.5, 0.25])
def test_what_a_file_tells_is_not_put_in_question(scale: float, tmp_path: Path) -> None:
    """B says its scale, and not its mask; the mask is found beside the scale that it says, and not beside another."""
    parts = vectors(Sizes())
    a = engine_file(tmp_path / "a.safetensors", [(CAUSAL, parts)])
    terms = [{"name": "scale", "value": scale}, {"name": "mask", "detail": "window"}]
    b = engine_file(tmp_path / "b.safetensors", [(Engine(greatest=15), parts)], terms=terms)
    report = diff(a, b)
    assert report.same is False
    assert [cause.name for cause in report.pairs[0].causes] == (["window"] if scale == 32**-0.5 else ["unknown"])


# -- beside a module ---------------------------------------------------------------------------------------------------

OF_MODULE = (("scale", 0, "gqa"), ("window", 0, "rope_gqa"), ("mask_offset", 0, "gqa"), ("rope_base", 0, "rope_gqa"))
KEY_HEADS = 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("cause", "number", "base"), OF_MODULE)
@pytest.mark.parametrize(("layout", "rows"), [("BLHE", None), ("LHE", 12)])
def test_a_module_against_the_few_heads_and_rows_of_an_engine(
    cause: str, number: int, base: str, layout: str, rows: int | None, tmp_path: Path
) -> None:
    a, b, given = case_of(cause, number, base).sides(batch=1)
    report = diff(a, hooked(calls_of(b, given), tmp_path / "b.safetensors", KEY_HEADS, layout, rows), given)
    assert (report.same, [one.name for one in report.pairs[0].causes]) == (False, [cause])
    report = diff(b, hooked(calls_of(b, given), tmp_path / "same.safetensors", KEY_HEADS, layout, rows), given)
    assert (report.same, report.pairs[0].causes) == (True, ())


def test_a_module_against_its_last_layer_alone(tmp_path: Path) -> None:
    model, given = build("rope_gqa"), inputs("rope_gqa", batch=1)
    report = diff(model, hooked(calls_of(model, given)[-1:], tmp_path / "b.safetensors", KEY_HEADS, "HLE"), given)
    pair = report.pairs[0]
    assert (len(report.pairs), pair.same, pair.causes, len(report.unpaired_a)) == (1, True, (), 2)


def test_a_module_behind_a_cache(tmp_path: Path) -> None:
    """Fewer rows than keys: the corner that the mask is laid to is another in the file."""
    a, b, given = case_of("mask_alignment", 0, "gqa").sides(batch=1)
    report = diff(a, hooked(calls_of(b, given), tmp_path / "b.safetensors", KEY_HEADS, "BHLE"), given)
    assert (report.same, [one.name for one in report.pairs[0].causes]) == (False, ["mask_alignment"])

"""A trace file is a stranger's: each rule that it breaks is one clear error, and costs nothing before."""

from __future__ import annotations

import io
import json
import math
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import sqrtdk
from sqrtdk import _json
from sqrtdk.errors import TraceFileError
from sqrtdk.recording import limits, read_trace_file
from sqrtdk.recording.header import read_header, read_tensor
from tests.recording_files.forged import GOOD, Tensors, forge, refused

LOGITS = [1, 1, 3, 5]


def call(**fields: Any) -> dict[str, Any]:
    return {"calls": [{"site": "a", **fields}]}


def terms(**fields: Any) -> dict[str, Any]:
    return call(terms=[fields])


def test_the_forged_file_is_good_where_nothing_is_planted(tmp_path: Path) -> None:
    (read,) = read_trace_file(forge(tmp_path / "a")).calls
    assert (read.site, read.index, read.terms, read.dtype) == ("a", 0, None, "float32")


DOCUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "version": ({"schema_version": 3}, "version '3'"),
    "shard of version 1": ({"calls": [{"site": "a", "shard": {}}]}, "'shard', and the file is of version 1"),
    "version of text": ({"schema_version": "1"}, "schema_version"),
    "version true": ({"schema_version": True}, "schema_version"),
    "no calls": ({"calls": None}, "calls is 'None'; expected array"),
    "calls": ({"calls": {}}, "calls is an object of 0; expected array"),
    "a call": ({"calls": [3]}, "calls[0] is '3'; expected object"),
    "unknown key": ({"writr": "x"}, "'writr'"),
    "unknown key of a call": (call(scale=1), "'scale'"),
    "unknown key of a vector": (call(q={"norm": 1}), "'norm'"),
    "unknown key of a term": (terms(name="mask", leest=0), "'leest'"),
    "unknown key of a step": (call(q={"steps": [{"name": "norm", "eps": 0}]}), "'eps'"),
    "no site": ({"calls": [{}]}, "calls[0] lacks 'site'"),
    "site": ({"calls": [{"site": 3}]}, "expected str, got int"),
    "long site": ({"calls": [{"site": "a" * 501}]}, "501 characters"),
    "long text": (call(missing="a" * 10_001), "10001 characters"),
    "layout": (call(layout="EHLB"), "layout is 'EHLB'; expected str matching"),
    "layout of three": (call(layout="HLE"), "layout is HLE"),
    "dtype": (call(dtype="int8"), "dtype is 'int8'; expected str matching"),
    "index": (call(index=-1), "expected int >= 0"),
    "index of text": (call(index="0"), "expected int | null, got str"),
    "index true": (call(index=True), "expected int | null, got bool"),
    "dropout": (call(dropout="much"), "dropout is 'much'; expected"),
    "dropout beyond all floats": (call(dropout=10**400), "beyond every number"),
    "factor": (call(k={"factor": []}), "factor is a list of 0; expected"),
    "many terms": (call(terms=[{"name": "softcap"}] * 65), "terms is a list of 65; expected array of length <= 64"),
    "many steps": (call(q={"steps": [{"name": "norm"}] * 65}), "steps is a list of 65; expected array of length <= 64"),
    "term": (terms(name="scaling"), "'scaling'"),
    "no term": (terms(value=1), "name"),
    "bounds": (terms(name="mask", least=0.5), "expected int"),
    "bounds without end": (terms(name="mask", least=-(10**30)), "bounds"),
    "bounds of one row": (terms(name="mask", least=0, shape=[1, 1, 1, 5]), "bounds"),
    "mask of another shape": (terms(name="mask", least=0, shape=[1, 1, 3, 6]), "does not broadcast"),
    "mask of more dimensions": (terms(name="mask", least=0, shape=[1, 1, 1, 3, 5]), "does not broadcast"),
    "mask without dimensions": (terms(name="mask", shape=[]), "no bits"),
    "added": (terms(name="mask", least=0, added=1), "expected bool"),
    "projection without input": (call(q={"projection": "w"}), "lacks its input"),
    "cut": (call(cut={"rows": 2, "rows_of": 9}), "2 rows"),
    "a negative head of a cut": (call(cut={"heads": [0, -1], "heads_of": 4}), "the heads '[0, -1]' of '4'"),
    "long name in same": ({"same": {"a" * 501: "calls.0.q"}}, "length <= 500"),
    "cut to more": (call(cut={"rows": 3, "rows_of": 2}), "3 rows of '2'"),
    "cut heads": (call(cut={"heads": [0, 9], "heads_of": 4}), "the heads '[0, 9]' of '4'"),
    "same of nothing": ({"same": {"calls.0.lse": "calls.9.lse"}}, "which the file lacks"),
    "same of itself": ({"same": {"calls.0.q": "calls.0.q"}}, "stands for"),
    "same of a copy": ({"same": {"calls.0.lse": "x", "x": "calls.0.q"}}, "which the file lacks"),
    "same": ({"same": [1]}, "same is a list of 1; expected object"),
    "same unused": ({"same": {"calls.0.lso": "calls.0.q"}}, "'calls.0.lso'"),
    "packages": ({"packages": {"torch": 2}}, "expected str"),
    "many packages": ({"packages": {str(n): "1" for n in range(201)}}, "packages is an object of 201; expected"),
    "many calls": ({"calls": [{"site": "a"}] * 4097}, "calls is a list of 4097; expected array of length <= 4096"),
    "call without tensors": ({"calls": [{"site": "a"}, {"site": "b"}]}, "no tensor 'calls.1.q'"),
    "deep": (call(q={"factor": [[[[[[[[[[[[[[1]]]]]]]]]]]]]]}), "nested too deeply"),
}  # fmt: skip


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents(tmp_path: Path, name: str) -> None:
    document, message = DOCUMENTS[name]
    refused(forge(tmp_path / "a", document=document), message)


TENSORS: dict[str, tuple[Tensors, dict[str, Any], str]] = {
    "E of q against k": ({"calls.0.k": ("F32", [1, 1, 5, 3])}, {}, "heads of 4 and 3 features"),
    "heads that don't divide": (
        {"calls.0.k": ("F32", [1, 3, 5, 4]), "calls.0.v": ("F32", [1, 3, 5, 6])}, {}, "2 heads of q can't share 3"),
    "no heads of k": (
        {"calls.0.k": ("F32", [1, 0, 5, 4]), "calls.0.v": ("F32", [1, 0, 5, 6])}, {}, "has no numbers"),
    "no features": ({"calls.0.q": ("F32", [1, 2, 3, 0]), "calls.0.k": ("F32", [1, 1, 5, 0])}, {}, "has no numbers"),
    "batch": ({"calls.0.k": ("F32", [2, 1, 5, 4])}, {}, "batches of 1 and 2"),
    "v": ({"calls.0.v": ("F32", [1, 1, 6, 6])}, {}, "does not fit k"),
    "output": ({"calls.0.output": ("F32", [1, 2, 3, 4])}, {}, "q and v make it"),
    "rank": ({"calls.0.q": ("F32", [2, 3, 4])}, {}, "layout is BHLE"),
    "q of integers": ({"calls.0.q": ("I32", [1, 2, 3, 4])}, {}, "is of int32"),
    "lse": ({"calls.0.lse": ("F32", [1, 2, 4])}, {}, "(B, Hq, L)"),
    "factor": ({"calls.0.q.factor": ("F32", [3, 1, 1])}, {}, "does not broadcast"),
    "factor twice": ({"calls.0.q.factor": ("F32", [2, 1, 1])}, call(q={"factor": 2}), "as a number and as a tensor"),
    "value twice": ({"calls.0.terms.0": ("F32", [2, 1, 1])}, terms(name="scale", value=2), "as a number"),
    "projected": ({"calls.0.q.projected": ("F32", [1, 2, 9, 4])}, {}, "does not fit what it became"),
    "step without a name": ({"calls.0.q.steps.0": ("F32", [1, 2, 3, 4])}, {}, "belongs to no call"),
    "weight of another width": (
        {"calls.0.q.input": ("F32", [1, 3, 8]), "calls.0.q.weight": ("F32", [2, 4, 9]),
         "calls.0.q.features": ("I64", [2, 4])}, call(q={"projection": "w"}), "don't fit"),
    "features of floats": (
        {"calls.0.q.input": ("F32", [1, 3, 8]), "calls.0.q.features": ("F32", [2, 4])},
        call(q={"projection": "w"}), "is of float32"),
    "bias": ({"calls.0.terms.0": ("F32", [1, 1, 3, 4])}, terms(name="bias"), "does not broadcast"),
    "bias of bools": ({"calls.0.terms.0": ("BOOL", LOGITS)}, terms(name="bias"), "is of bool"),
    "mask of floats": ({"calls.0.terms.0": ("F32", LOGITS)}, terms(name="mask"), "is of float32"),
    "mask": ({"calls.0.terms.0": ("BOOL", [1, 1, 3, 4])}, terms(name="mask"), "does not broadcast"),
    "mask twice": ({"calls.0.terms.0": ("BOOL", LOGITS)}, terms(name="mask", least=0), "told twice"),
    "mask with a shape": ({"calls.0.terms.0": ("BOOL", LOGITS)}, terms(name="mask", shape=LOGITS), "a shape beside"),
    "bits without a shape": ({"calls.0.terms.0.bits": ("U8", [2])}, terms(name="mask"), "no shape"),
    "too few bits": ({"calls.0.terms.0.bits": ("U8", [1])}, terms(name="mask", shape=LOGITS), "(2,) bytes"),
    "padding": ({"calls.0.terms.0.padding": ("BOOL", [1, 1, 1, 4])}, terms(name="mask", least=0), "does not broadcast"),
    "sinks": ({"calls.0.terms.0": ("F32", [3])}, terms(name="sinks"), "one logit a query head"),
    "kept": ({"calls.0.kept": ("BOOL", [1, 2, 3, 3])}, {}, "does not broadcast"),
    "record": ({"calls.0.record": ("U8", [1, 9])}, {}, "it is a text"),
    "empty record": ({"calls.0.record": ("U8", [0])}, {}, "not JSON"),
    "record of zeros": ({"calls.0.record": ("U8", [9])}, {}, "not JSON"),
    "long record": ({"calls.0.record": ("U8", [2**22 + 1])}, {}, "at most 4194304"),
    "nobody's": ({"calls.0.o": ("F32", [1])}, {}, "'calls.0.o'"),
    "of another call": ({"calls.1.q": ("F32", [1])}, {}, "'calls.1.q'"),
}  # fmt: skip


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_do_not_fit(tmp_path: Path, name: str) -> None:
    tensors, document, message = TENSORS[name]
    refused(forge(tmp_path / "a", tensors, document), message)


def _offsets(name: str, start: int, end: int) -> Callable[[dict[str, Any]], Any]:
    def change(header: dict[str, Any]) -> dict[str, Any]:
        header[name]["data_offsets"] = [start, end]
        return header

    return change


def _entry(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda header: header | {"calls.0.q": header["calls.0.q"] | fields}


HEADERS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "overlap": (_offsets("calls.0.k", 0, 80), "overlap"),
    "a hole": (_offsets("calls.0.k", 100, 180), "nobody's"),
    "beyond the end": (_offsets("calls.0.output", 2**40, 2**40 + 144), "nobody's"),
    "backwards": (_offsets("calls.0.k", 96, 16), "needs 80 bytes and has -80"),
    "negative": (_offsets("calls.0.q", -96, 0), "no counts"),
    "another size": (_offsets("calls.0.q", 0, 97), "needs 96 bytes and has 97"),
    "huge": (_entry(shape=[2**40, 2**40, 2**40, 2**40]), "needs"),
    "huge side": (_entry(shape=[2**41, 0]), "at most 1099511627776"),
    "dimensions": (_entry(shape=[1] * 9), "9 dimensions"),
    "dtype": (_entry(dtype="C64"), "dtype 'C64'"),
    "dtype of a list": (_entry(dtype=["F32"]), "dtype"),
    "shape of floats": (_entry(shape=[1.0, 2, 3, 4]), "no counts"),
    "shape of truths": (_entry(shape=[True, 2, 3, 4]), "no counts"),
    "shape": (_entry(shape=7), "no counts"),
    "one offset": (_entry(data_offsets=[0]), "no counts"),
    "unknown key": (_entry(strides=[1]), "not described by"),
    "no entry": (lambda header: header | {"calls.0.q": 3}, "not described by"),
    "long name": (lambda header: header | {"a" * 501: header["calls.0.q"]}, "501 characters"),
    "a list": (lambda header: [header], "header is a list"),
    "no metadata": (lambda header: {"calls.0.q": header["calls.0.q"]}, "not a trace file"),
    "metadata": (lambda header: header | {"__metadata__": [1]}, "not a trace file"),
    "metadata of another": (lambda header: header | {"__metadata__": {"format": "pt"}}, "not a trace file"),
    "metadata of a number": (lambda header: header | {"__metadata__": {"sqrtdk_trace": 1}}, "not a trace file"),
    "no JSON": (lambda header: b"{", "not JSON"),
    "no UTF-8": (lambda header: b"\xff{}", "not JSON"),
    "twice": (lambda header: b'{"a": 1, "a": 2}', "'a' twice"),
    "NaN": (lambda header: b'{"a": NaN}', "no JSON"),
    "deep": (lambda header: b'{"a":' + b"[" * 300_000 + b"]" * 300_000 + b"}", "nested too deeply"),
    "brackets": (lambda header: b"[" + b"[]," * 2**19 + b"[]]", "brackets"),
    "escapes": (lambda header: header | {"\x1b[31m": 3}, r"'\x1b[31m'"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers(tmp_path: Path, name: str) -> None:
    change, message = HEADERS[name]
    refused(forge(tmp_path / "a", header=change), message)


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "not JSON"), ("[]", "schema_version"), ('{"schema_version": 1, "schema_version": 1}', "twice")],
)
def test_documents_that_are_none(tmp_path: Path, text: str, message: str) -> None:
    refused(forge(tmp_path / "a", text=text), message)


def test_many_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sqrtdk.recording.header.MAX_TENSORS", 3)
    refused(forge(tmp_path / "a"), "4 tensors; at most 3")


def test_many_names_that_stand_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sqrtdk.recording.source.MAX_TENSORS", 1)
    refused(
        forge(tmp_path / "a", document={"same": {"calls.0.lse": "calls.0.q", "x": "calls.0.q"}}), "2 names in 'same'"
    )


RECORDS: dict[str, tuple[Any, str]] = {
    "a list": ([], "expected object, got array"),
    "nothing": ({}, "lacks"),
    "unknown field": ({"sites": 3}, "unknown field 'sites'"),
    "a number for a text": ({"site": 3}, "expected str, got int"),
    "a text for a count": ({"heads": "4"}, "expected int, got str"),
    "a text for a list": ({"stages": "rope"}, "expected array, got str"),
    "a text for a stage": ({"stages": ["rope"]}, "expected object, got str"),
    "long text": ({"formula": "a" * 10_001}, "10001 characters"),
}


def _record() -> str:
    layer, x = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(1, 3, 8)
    with sqrtdk.trace(layer) as run:
        layer(x, x, x)
    return _json.exact_line(run.calls[0])


@pytest.mark.parametrize("name", RECORDS)
def test_records_that_are_none(tmp_path: Path, name: str) -> None:
    """JSON, and no record of a call."""
    document, message = RECORDS[name]
    whole = isinstance(document, dict) and document
    text = json.dumps({**json.loads(_record()), **document} if whole else document).encode()
    path = forge(tmp_path / "a", {"calls.0.record": ("U8", [len(text)])})
    path.write_bytes(path.read_bytes()[: -len(text)] + text)
    refused(path, message)


def test_two_calls_of_one_index(tmp_path: Path) -> None:
    second = {name.replace("calls.0", "calls.1"): spec for name, spec in GOOD.items()}
    calls = [{"site": "a", "index": 1}, {"site": "a"}]
    refused(forge(tmp_path / "a", second, {"calls": calls}), "site 'a' with index 1")
    counted = read_trace_file(forge(tmp_path / "b", second, {"calls": [{"site": "a"}, {"site": "a"}]}))
    assert [call.index for call in counted.calls] == [0, 1]


def test_numbers_of_a_mask_that_are_neither_0_nor_1(tmp_path: Path) -> None:
    path = forge(tmp_path / "a", {"calls.0.terms.0": ("U8", LOGITS)}, terms(name="mask"))
    (read,) = read_trace_file(path).calls
    assert read.terms is not None
    assert torch.equal(read.terms[0].value, torch.zeros(LOGITS, dtype=torch.bool))  # type: ignore[arg-type]
    path.write_bytes(path.read_bytes()[:-1] + b"\x02")
    refused(path, "holds 2")


def test_every_truncation_isrefused(tmp_path: Path) -> None:
    whole = forge(tmp_path / "a").read_bytes()
    for size in (0, 7, 8, 9, 100, len(whole) - 1):
        (tmp_path / "b").write_bytes(whole[:size])
        whole_header = size == len(whole) - 1
        refused(tmp_path / "b", "439 are there" if whole_header else "cut off" if size > 7 else "takes 8")
    (tmp_path / "b").write_bytes(whole + b"\0")
    refused(tmp_path / "b", "1 bytes follow")


def test_a_file_that_becomes_shorter_while_it_is_read(tmp_path: Path) -> None:
    whole = forge(tmp_path / "a").read_bytes()
    file = io.BytesIO(whole[:-1])
    header = read_header(file, len(whole))
    assert read_tensor(file, header, header.specs["calls.0.q"]).shape == (1, 2, 3, 4)
    with pytest.raises(TraceFileError, match="144 bytes were to come at 296"):
        read_tensor(file, header, header.specs["calls.0.output"])


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "none", tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        refused(path, "")
    (tmp_path / "pickle").write_bytes(b"\x80\x04\x95" + b"\xff" * 100)
    refused(tmp_path / "pickle", "header of")


def test_large_files_are_refused_by_their_size(tmp_path: Path) -> None:
    with open(tmp_path / "a", "wb") as file:
        file.truncate(limits.MAX_TRACE_BYTES + 1)
    refused(tmp_path / "a", "17179869185 bytes")


def test_nothing_large_is_made_before_the_checks(tmp_path: Path) -> None:
    """Few bytes that stand for much: masks of 2^30 entries and more, tensors of a sparse file."""
    rows = 2**16
    long = {
        "calls.0.q": ("F8_E4M3", [1, 1, rows, 1]),
        "calls.0.k": ("F8_E4M3", [1, 1, rows, 1]),
        "calls.0.v": ("F8_E4M3", [1, 1, rows, 1]),
        "calls.0.output": ("F8_E4M3", [1, 1, rows, 1]),
    }
    assert rows * rows > limits.MAX_MASK
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(forge(tmp_path / "a", long, terms(name="mask", least=0)), "4294967296 entries in the mask")
    eighth = [1, 1, rows, rows // 8]
    many = {name: (kind, [1, 1, rows // 8, 1] if name[-1] in "kv" else shape) for name, (kind, shape) in long.items()}
    windows = [{"name": "mask", "least": 0, "greatest": size, "shape": eighth} for size in range(9)]
    refused(forge(tmp_path / "b", many, call(terms=windows)), "entries in all masks")
    path = forge(tmp_path / "c", {"calls.0.q": ("F32", [1, 2, 2**28, 4])}, content=b"")
    os.truncate(path, path.stat().st_size + 2**33 + 344)
    refused(path, "output has shape")
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after - before < 2**16  # KiB


def test_nan_and_infinity_are_read_and_told(tmp_path: Path) -> None:
    path = forge(tmp_path / "a", document={"calls": [{"site": "a\n"}]})
    content = bytearray(path.read_bytes())
    content[-4:] = b"\x00\x00\xc0\x7f"
    content[-8:-4] = b"\x00\x00\x80\xff"
    path.write_bytes(content)
    read = read_trace_file(path)
    assert read.notes == (r"output of 'a\n#0' holds 1 NaN and 1 infinite of 36 numbers",)
    assert read.calls[0].output[0, 1, 2, 4:].tolist()[0] == -math.inf

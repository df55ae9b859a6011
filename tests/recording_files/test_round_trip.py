"""What is read is what was written, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sqrtdk.masks.packed import pack_mask, unpack_mask
from sqrtdk.messages import Message, said
from sqrtdk.recording import Cut, TraceMetadata, read_trace_file, write_trace_file
from sqrtdk.recording.cut import cut_call
from sqrtdk.recording.document import with_sentences
from sqrtdk.tracing.records import NotMeasured
from sqrtdk.tracing.tensors import CallTensors, Vector
from sqrtdk.tracing.trace import Trace
from tests.recording_files.sample_calls import MASKS, calls, mask, unlike

SETTINGS = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@SETTINGS
@given(one=calls(), other=calls(index=1))
def test_a_call_comes_back_bit_for_bit(tmp_path: Path, one: CallTensors, other: CallTensors) -> None:
    path = tmp_path / "run.safetensors"
    recording = write_trace_file(path, [one, other], projections=True, force=True)
    read = read_trace_file(path)
    assert unlike((one, other), read.calls) == []
    assert recording.bytes == path.stat().st_size
    assert read.cuts == (None, None)


@SETTINGS
@given(call=calls(), rows=st.integers(1, 4), data=st.data())
def test_a_cut_call_comes_back_with_what_was_cut(
    tmp_path: Path, call: CallTensors, rows: int, data: st.DataObject
) -> None:
    heads = data.draw(st.sets(st.integers(0, call.query.values.shape[1] - 1), min_size=1))
    less, cut = cut_call(call, rows, sorted(heads))
    path = tmp_path / "run.safetensors"
    write_trace_file(path, [less], cuts=[cut], projections=True, force=True)
    read = read_trace_file(path)
    assert unlike((less,), read.calls) == []
    assert read.cuts == (cut,)
    assert read.calls[0].query.values.shape[1:3] == (len(heads), min(rows, call.query.values.shape[2]))


def test_projections_are_left_out_unless_they_are_asked_for(tmp_path: Path) -> None:
    with_weights, without = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    module = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    with Trace(module, stats=True, keep=True) as run:
        x = torch.randn(2, 6, 32)
        module(x, x, x, is_causal=True, attn_mask=torch.ones(6, 6).triu(1).bool())
    (call,) = run.tensors
    assert call.query.projection is not None
    write_trace_file(with_weights, [call], projections=True)
    write_trace_file(without, [call])
    (whole,), (less,) = read_trace_file(with_weights).calls, read_trace_file(without).calls
    assert unlike(call, whole) == []  # with the record: scale, factors, mask, statistics of the heads
    assert whole.call is not None
    assert whole.call.stats == call.call.stats  # type: ignore[union-attr]
    assert (less.query.projection, less.key.projection, less.value.projection) == (None, None, None)
    assert without.stat().st_size < with_weights.stat().st_size
    assert b".weight" not in without.read_bytes()


def test_what_is_said_of_the_run_comes_back(tmp_path: Path) -> None:
    metadata = TraceMetadata(
        "sqrtdk 9", "org/name", "Model", "bfloat16", "cuda:0", "sdpa", {"torch": "2.13", "jax": "0.7"},
        (NotMeasured("layers.1", "it ran unseen", None, "port.py:3"),),
    )  # fmt: skip
    inputs = {"input_ids": torch.arange(6).reshape(2, 3), "0": torch.ones(2, dtype=torch.bool)}
    path = tmp_path / "run.safetensors"
    write_trace_file(path, [], metadata, model_inputs=inputs)
    read = read_trace_file(path)
    assert read.metadata == metadata
    assert unlike(tuple(inputs.values()), tuple(read.model_inputs[name] for name in inputs)) == []
    assert (read.path, read.schema_version, read.calls, read.notes) == (path, 1, (), ())


def test_a_call_without_tensors_says_why(tmp_path: Path) -> None:
    nothing = Vector(torch.zeros(0))
    call = CallTensors("layers.0", 3, nothing, nothing, nothing, nothing.values, None, missing="its keys are channels")
    path = tmp_path / "run.safetensors"
    write_trace_file(path, [call], cuts=[cut_call(call, 1, [0])[1]])
    assert unlike((call,), read_trace_file(path).calls) == []


def test_equal_tensors_are_in_the_file_once(tmp_path: Path) -> None:
    big = Vector(torch.randn(1, 2, 32, 32))
    made = [
        CallTensors(f"layers.{n}", 0, big, Vector(big.values.clone()), big, big.values.clone(), None) for n in (0, 1)
    ]
    path = tmp_path / "run.safetensors"
    write_trace_file(path, made)
    assert path.stat().st_size < 2 * big.values.nbytes
    read = read_trace_file(path)
    assert unlike(tuple(made), read.calls) == []
    assert len({part.values.data_ptr() for call in read.calls for part in (call.query, call.key, call.value)}) == 1


@pytest.mark.parametrize("kind", ["causal", "lower right", "window", "left padding", "right padding"])
def test_masks_that_are_bands_take_bounds_and_bits_of_the_padding(kind: str) -> None:
    rows, keys = 16, 24
    visible = mask("window" if kind == "window" else kind, torch.Generator().manual_seed(1), 3, 2, rows, keys)
    packed = pack_mask(visible)
    assert torch.equal(unpack_mask(packed), visible)
    assert packed.bits is None
    assert (packed.padding is not None) == kind.endswith("padding")
    least, greatest = {"lower right": (rows - keys, None), "window": (0, 2)}.get(kind, (0, None))
    assert (packed.least, packed.greatest) == (least, greatest)


@pytest.mark.parametrize("kind", MASKS)
def test_every_mask_is_packed_and_unpacked_exactly(kind: str) -> None:
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        sizes = (int(size) for size in torch.randint(1, 12, (4,), generator=generator))
        visible = mask(kind, generator, *sizes)
        assert torch.equal(unpack_mask(pack_mask(visible)), visible)


def test_a_cut_names_rows_and_heads() -> None:
    values = torch.randn(1, 4, 6, 8)
    call = CallTensors("a", 0, Vector(values), Vector(values[:, :2]), Vector(values[:, :2]), values, None)
    assert cut_call(call, 6, [3, 2, 1, 0])[1] is None
    less, cut = cut_call(call, 2, [3, 0, 3])
    assert cut == Cut(2, 6, (0, 3), 4)
    assert torch.equal(less.key.values, values[:, :2])


SENTENCE = Message("recording.not_written", error="h")


def test_the_sentences_of_a_file_are_said_in_both_languages(tmp_path: Path) -> None:
    nothing = Vector(torch.zeros(0))
    call = CallTensors("h", 0, nothing, nothing, nothing, nothing.values, terms=None, missing=SENTENCE)
    metadata = TraceMetadata(not_measured=(NotMeasured("h.1", SENTENCE), NotMeasured("h.2", "plain")))
    write_trace_file(tmp_path / "a.safetensors", [call], metadata)
    read = read_trace_file(tmp_path / "a.safetensors")
    reasons = [read.calls[0].missing or "", *(entry.reason for entry in read.metadata.not_measured)]
    assert reasons == [SENTENCE, SENTENCE, "plain"]
    assert [said(reason, "zh") for reason in reasons] == ["其张量无法写入：h", "其张量无法写入：h", "plain"]


@pytest.mark.parametrize("text", ["[]", '{"h": 1}', '{"its tensors can\'t be written: h": {"message_id": "../x"}}'])
def test_ids_that_do_not_fit_leave_the_sentences(text: str) -> None:
    metadata = TraceMetadata(not_measured=(NotMeasured("h", str(SENTENCE)),))
    assert with_sentences(text, [], metadata) == ((), metadata)

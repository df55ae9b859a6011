"""`record`: what a model's attentions computed with is in the file, and the model is as it was."""

from __future__ import annotations

import importlib.metadata
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import sqrtdk
from sqrtdk.audit.context import tokens_of
from sqrtdk.errors import InvalidTypeError, InvalidValueError, ModelError, OutputError
from sqrtdk.models.load import resolve_model
from sqrtdk.models.options import LoadOptions
from sqrtdk.models.run import call as forward
from sqrtdk.recording import Cut, read_trace_file
from sqrtdk.tracing.tensors import CallTensors
from sqrtdk.tracing.trace import Trace
from tests.recording_files.sample_calls import unlike


class Block(torch.nn.Module):
    """Two attentions at one site, a gated one, one over channels; dropout, which evaluation mode ends."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(16, 4, dropout=0.5, batch_first=True)
        self.out = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Attend twice, the second time without a mask; then along the channels."""
        mask = None if hidden is None else hidden.bool()
        x = x + self.attention(x, x, x, key_padding_mask=mask, need_weights=False)[0]
        x = x + self.attention(x, x, x, need_weights=True)[0]
        channels = (x.mT @ x * 0.25).softmax(-1)
        return self.out(x @ channels)


def traced(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> tuple[CallTensors, ...]:
    tokens = tokens_of(model, inputs)
    with torch.random.fork_rng(), Trace(model, stats=False, tokens=tokens.of, keep=True) as run:
        torch.manual_seed(0)
        forward(model.eval(), inputs)
    return run.tensors


def test_the_file_holds_what_the_trace_keeps(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    said: list[str] = []
    recording = sqrtdk.record("demo", None, path, projections=True, seq_len=12, batch=2, announce=said.append)
    read = read_trace_file(path)
    loaded = resolve_model("demo", LoadOptions(seq_len=12, batch=2))
    assert isinstance(loaded.inputs, dict)
    kept = traced(loaded.module, loaded.inputs)
    assert [call.call.formula for call in kept if call.call] == [call.call.formula for call in read.calls if call.call]
    # the record names the line that ran the demo, which is another one here
    without = [tuple(replace(call, call=None) for call in calls) for calls in (kept, read.calls)]
    assert unlike(*without) == []
    assert torch.equal(read.model_inputs["input_ids"], loaded.inputs["input_ids"])
    assert (recording.calls, recording.bytes, recording.notes) == (3, path.stat().st_size, ())
    assert said == [f"run.safetensors: 3 calls, {recording.bytes / 1000:.3g} kB"]
    assert read.metadata == recording.metadata
    told = read.metadata
    assert (told.model, told.module_class, told.dtype, told.device) == ("demo", "DemoModel", "float32", "cpu")
    assert told.writer == f"sqrtdk {sqrtdk.__version__}"
    assert told.packages["torch"] == importlib.metadata.version("torch")


def test_a_module_is_recorded_and_left_as_it_was(tmp_path: Path) -> None:
    module = Block().train()
    module.out.eval()
    inputs = {"x": torch.randn(2, 5, 16), "hidden": torch.zeros(2, 5).index_fill_(1, torch.tensor([4]), 1.0)}
    state = torch.get_rng_state(), random.getstate()
    recording = sqrtdk.record(module, inputs, tmp_path / "a")
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]
    assert (module.training, module.attention.training, module.out.training) == (True, True, False)
    assert not module.attention._forward_hooks
    assert torch.backends.mha.get_fastpath_enabled()
    read = read_trace_file(tmp_path / "a")
    assert [(call.site, call.index) for call in read.calls[:2]] == [("attention", 0), ("attention", 1)]
    assert {call.dropout for call in read.calls} == {0.0}
    first = read.calls[0]
    assert first.terms is not None
    (mask,) = (term.value for term in first.terms if term.name == "mask")
    assert not mask[..., 4].any()  # type: ignore[index]
    assert mask[..., :4].all()  # type: ignore[index]
    lost = [call for call in read.calls if call.missing]
    assert len(lost) == sum("has no tensors" in note for note in recording.notes)
    assert set(read.model_inputs) == {"x", "hidden"}
    sqrtdk.record(module, inputs["x"], tmp_path / "b")
    assert set(read_trace_file(tmp_path / "b").model_inputs) == {"0"}


def test_less_of_a_model(tmp_path: Path) -> None:
    whole, less = tmp_path / "a", tmp_path / "b"
    sqrtdk.record("demo", None, whole, seq_len=12)
    recording = sqrtdk.record("demo", None, less, seq_len=12, calls="*.1.*", rows=3, heads=[1])
    (call,) = read_trace_file(less).calls
    assert read_trace_file(less).cuts == (Cut(3, 12, (1,), 2),)
    full = read_trace_file(whole).calls[1]
    assert (recording.calls, call.site) == (1, full.site)
    assert torch.equal(call.query.values, full.query.values[:, 1:, :3])
    assert torch.equal(call.key.values, full.key.values[:, 1:])
    assert torch.equal(call.output, full.output[:, 1:, :3])
    assert call.terms is not None
    assert call.terms[1].value.shape[-2:] == (3, 12)  # type: ignore[union-attr]


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_model_with_grouped_heads(tmp_path: Path, attn: str, dtype: torch.dtype) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(dtype)
    inputs = {"input_ids": torch.arange(14).reshape(2, 7), "attention_mask": torch.ones(2, 7, dtype=torch.int64)}
    inputs["attention_mask"][0, :2] = 0
    recording = sqrtdk.record(model, inputs, tmp_path / "a", attn=attn, projections=True)
    read = read_trace_file(tmp_path / "a")
    assert recording.notes == ()
    assert read.metadata.attn == attn
    model.set_attn_implementation(attn)
    assert unlike(traced(model, inputs), read.calls) == []
    assert {call.dtype for call in read.calls} == {str(dtype).removeprefix("torch.")}
    assert {call.key.values.shape[1] for call in read.calls} <= {2, 4}


def test_a_call_that_can_not_be_written_is_told_and_the_others_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sqrtdk.recording import record as room

    def fits(call: CallTensors, *, projections: bool) -> None:
        if call.site.startswith("blocks.1"):
            raise InvalidValueError("too odd")

    monkeypatch.setattr(room, "check_limits", fits)
    recording = sqrtdk.record("demo", None, tmp_path / "a", seq_len=8, rows=2, heads=[0])
    assert recording.notes == (
        "blocks.1.attention#0 has no tensors in the file: its tensors can't be written: too odd",
    )
    calls = read_trace_file(tmp_path / "a").calls
    assert [call.missing is None for call in calls] == [True, False, True]
    assert calls[1].call is not None


def test_what_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with pytest.raises(InvalidValueError, match="no attention ran at 'layers") as caught:
        sqrtdk.record("demo", None, path, calls="layers.*", seq_len=8)
    assert "blocks.0.attention" in caught.value.hint
    with pytest.raises(InvalidValueError, match="has 2"):
        sqrtdk.record("demo", None, path, heads=[2], seq_len=8)
    with pytest.raises(InvalidValueError, match="0 rows"):
        sqrtdk.record("demo", None, path, rows=0)
    with pytest.raises(InvalidValueError, match="no path"):
        sqrtdk.record("demo")
    with pytest.raises(ModelError, match="meta device"):
        sqrtdk.record("demo", None, path, device="meta", seq_len=8)
    with pytest.raises(ModelError, match="no attention could be read in Linear"):
        sqrtdk.record(torch.nn.Linear(2, 2), torch.ones(1, 2), path)
    with pytest.raises(InvalidTypeError):
        sqrtdk.record(3, None, path)  # type: ignore[arg-type]
    with pytest.raises(OutputError, match="there is no directory"):
        sqrtdk.record("no-such-model", None, tmp_path / "b" / "c")
    assert list(tmp_path.iterdir()) == []

"""A watch changes nothing, sees what it says, and ends no training: laws of `watch` without a compiler."""

from __future__ import annotations

import copy
import io
import math
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module

from sqrtdk.errors import InvalidTypeError, InvalidValueError, OutputError
from sqrtdk.monitor import forwards, journal, seen
from sqrtdk.monitor.reading import read_run
from sqrtdk.monitor.samples import Alarm, StepSample
from sqrtdk.monitor.sums import MAXIMA, SUMS, HeadSums
from sqrtdk.monitor.watch import AttentionAlarm, AttentionWarning, Watch, watch
from sqrtdk.tracing.trace import Trace

SMALL = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=16, vocab_size=61, **IDS)
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        **SMALL, intermediate_size=24, num_key_value_heads=1, attention_dropout=0.1, max_position_embeddings=16, **IDS
    )
    return transformers.LlamaForCausalLM(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(**SMALL, intermediate_size=24, max_position_embeddings=16, **IDS)
    return transformers.BertForMaskedLM(config)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
        self.embed, self.body, self.head = nn.Embedding(61, 16), nn.TransformerEncoder(layer, 2), nn.Linear(16, 61)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        logits = self.head(self.body(self.embed(input_ids)))
        return transformers.utils.ModelOutput(loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten()))


class Attend(nn.Module):
    """The smallest model: one attention of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v)


MODELS: dict[str, Callable[[], nn.Module]] = {"gpt2": gpt2, "llama": llama, "bert": bert, "encoder": Encoder}


def train(model: nn.Module, steps: int, health: Watch | None = None) -> tuple[list[float], Tensor]:
    """Losses, and what the random number generator holds at the end; with dropout."""
    torch.manual_seed(1)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    with health or nullcontext():
        for _ in range(steps):
            ids = torch.randint(61, (2, 7))
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if health is not None:
                health.step(loss)
    return losses, torch.get_rng_state()


def called(model: nn.Module, steps: int = 1, **options: Any) -> Watch:
    """A run of some steps."""
    with Watch(model, **options) as health:
        for _ in range(steps):
            model(torch.randn(1, 3, 8)).sum().backward()
            health.step()
    return health


def one_step(health: Watch, work: Callable[[], object]) -> None:
    with health:
        work()
        health.step()


def module_state(model: nn.Module) -> dict[str, Any]:
    return {
        f"{path}.{name}": list(value) if isinstance(value, dict) else id(value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
    }


def global_hooks() -> dict[str, int]:
    return {name: len(value) for name, value in vars(torch_module).items() if name.startswith("_global_") and value}


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = global_hooks()
    yield
    assert global_hooks() == before
    assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 5])
@pytest.mark.parametrize("name", MODELS)
def test_losses_of_50_steps_are_bit_equal(name: str, every: int) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    model.train()
    watched = copy.deepcopy(model)
    keys, state = list(watched.state_dict()), module_state(watched)
    health = Watch(watched, every=every, on_alarm="raise")
    plain, watched_run = train(model, 50), train(watched, 50, health)
    assert watched_run[0] == plain[0]
    assert torch.equal(watched_run[1], plain[1])
    assert list(watched.state_dict()) == keys
    assert module_state(watched) == state
    assert [sample.step for sample in health.samples] == sorted({1, *range(every, 51, every)})
    assert {len(sample.calls) for sample in health.samples} == {2}
    assert {sample.how for sample in health.samples} == {"as is"}
    assert [sample.loss for sample in health.samples] == [plain[0][sample.step - 1] for sample in health.samples]
    for sample in health.samples:
        for call in sample.calls:
            assert call.reason is None
            assert call.scale_ratio == pytest.approx(1.0)
            assert call.columns["rows"] == [14.0, 14.0]
            if name != "encoder":  # nn.MultiheadAttention projects by a function
                assert all(value > 0 for value in call.columns["query_grad_max"])


class Boom(RuntimeError):
    pass


class Failing(Attend):
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        if self.fails:
            raise Boom
        return result


@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
def test_nothing_is_left_when_the_loop_raises(error: type[BaseException]) -> None:
    model = Attend()
    state = module_state(model)

    def work() -> None:
        model(torch.randn(1, 3, 8))
        raise error

    with pytest.raises(error):
        one_step(Watch(model), work)
    assert module_state(model) == state
    with Watch(model):  # it is not watched any more
        pass


def test_a_forward_that_raises_is_followed_by_others() -> None:
    model = Failing()
    with Watch(model, every=1) as health:
        model.fails = True
        with pytest.raises(Boom):
            model(torch.randn(1, 3, 8))
        model.fails = False
        model(torch.randn(1, 5, 8))
        health.step()
    (call,) = health.samples[0].calls
    assert call.columns["rows"] == [8.0, 8.0]  # what ran before the error counts


@pytest.mark.parametrize("method", ["__enter__", "__exit__"])
def test_a_trace_that_fails_ends_no_training(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = Trace.__exit__

    def fail(self: Trace, *args: Any) -> None:
        if method == "__exit__":
            ended(self, None, None, None)
        raise Boom("out of order")

    monkeypatch.setattr(Trace, method, fail)
    model = Attend()
    with pytest.warns(AttentionWarning, match=r"at step 1 \(not measured: the trace did not .*out of order"):
        health = called(model, 2, every=1)  # the second step is not warned of again
    assert [sample.how.startswith("not measured: the trace did not") for sample in health.samples] == [True, True]
    assert [alarm.name for alarm in health.alarms] == ["lost"]


def test_sums_that_fail_end_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(sums: list[HeadSums]) -> None:
        raise Boom("no memory")

    monkeypatch.setattr(seen, "table", fail)
    model = Attend()
    with pytest.warns(AttentionWarning, match="no memory"):
        health = called(model)
    assert health.samples[0].calls == ()


def test_a_gradient_that_fails_ends_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise Boom("no memory")

    monkeypatch.setattr(forwards.Gradients, "_measure", fail)
    model = Attend()
    with Watch(model, every=1) as health:
        model(torch.randn(1, 3, 8)).sum().backward()
        health.step()
    assert "a gradient of q or k: Boom: no memory" in health.samples[0].not_measured
    assert health.samples[0].calls[0].columns["rows"] == [3.0, 3.0]


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_is_no_watched_model(how: str) -> None:
    model = Attend()

    def copied() -> nn.Module:
        if how == "deepcopy":
            return copy.deepcopy(model)
        if how == "pickle":
            return pickle.loads(pickle.dumps(model))
        torch.save(model, buffer := io.BytesIO())
        buffer.seek(0)
        return torch.load(buffer, weights_only=False)

    with Watch(model, every=1) as health:
        model(torch.randn(1, 3, 8))
        other = copied()
        other(torch.randn(1, 7, 8))
        with Watch(other):
            pass
        health.step()
    assert health.samples[0].calls[0].columns["rows"] == [3.0, 3.0]
    assert module_state(other).keys() == module_state(model).keys()
    assert other.qkv.weight.data_ptr() != model.qkv.weight.data_ptr()


def test_the_forward_of_another_thread_is_not_counted() -> None:
    model = Attend()
    inside = threading.Event()

    def run() -> None:
        model(torch.randn(4, 9, 8)).sum().backward()
        inside.set()

    with Watch(model, every=1) as health:
        other = threading.Thread(target=run)
        model(torch.randn(1, 3, 8)).sum().backward()
        other.start()
        other.join()
        rows = {part.shape for parts in health._forwards._gradients.rows.values() for part in parts}
        health.step()
    assert inside.is_set()
    assert health.samples[0].calls[0].columns["rows"] == [3.0, 3.0]
    assert not any("grad" in reason for reason in health.samples[0].not_measured)
    assert rows == {(2, 3)}


def test_one_watch_a_model() -> None:
    model = Attend()
    with Watch(model), pytest.raises(InvalidValueError, match="one watch at a time"), Watch(model):
        pass
    with Watch(model):
        pass


def test_a_watch_is_for_one_block() -> None:
    health = Watch(model := Attend(), every=1)
    with health:
        model(torch.randn(1, 3, 8))
        health.step()
    with pytest.raises(InvalidValueError, match="for one block"), health:
        pass


def test_a_part_of_a_watched_model_may_be_watched_too() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Attend())
    with Watch(model, every=1) as whole, Watch(model[1], every=1) as part:
        model(torch.randn(1, 3, 8)).sum().backward()
        model[1](torch.randn(1, 4, 8))
        part.step()
        whole.step()
    (outer,), (inner,) = whole.samples[0].calls, part.samples[0].calls
    assert (outer.site, inner.site) == ("1", "")
    assert outer.columns["rows"] == [3.0, 3.0]
    assert inner.columns["rows"] == [7.0, 7.0]
    assert inner.columns["query_grad_max"] == outer.columns["query_grad_max"]


def test_a_model_that_calls_itself_is_one_forward_pass() -> None:
    class Twice(Attend):
        def forward(self, x: Tensor, again: bool = True) -> Tensor:
            return super().forward(x) + (self(x, again=False) if again else 0.0)

    model = Twice()
    with Watch(model, every=1) as health:
        model(torch.randn(1, 3, 8))
        health.step()
    assert [(call.index, call.columns["rows"]) for call in health.samples[0].calls] == [
        (0, [3.0, 3.0]),
        (1, [3.0, 3.0]),
    ]


def test_what_q_is_made_of_before_a_module_is_seen_in_a_model_that_is_one_attention() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            q, k = self.norm(self.q(x) * 0.25)[:, None], self.k(x)[:, None]
            return F.scaled_dot_product_attention(q, k, k, scale=1.0)

    model = Normed()
    with Watch(model, every=1) as health:
        model(torch.randn(1, 3, 8))
        health.step()
    assert health.samples[0].calls[0].scale_ratio == pytest.approx(0.25 * math.sqrt(8), rel=1e-5)


def test_several_forward_passes_of_a_step_are_one_attention() -> None:
    model = Attend()
    with Watch(model, every=2) as health:
        for length in (3, 4, 5):
            model(torch.randn(1, length, 8))
        health.step()
    assert health.samples[0].calls[0].columns["rows"] == [12.0, 12.0]
    assert len(health.samples[0].calls) == 1


def test_a_step_without_end_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwards, "MOST", 3)
    model = Attend()
    with Watch(model, every=1) as health:
        for _ in range(5):
            model(torch.randn(1, 2, 8))
        health.step()
    assert health.samples[0].calls[0].columns["rows"] == [6.0, 6.0]
    assert [reason for reason in health.samples[0].not_measured if "step() called?" in reason]


def test_what_is_held_until_the_step_ends_is_bounded_by_rows() -> None:
    def held(rows: int | None, batches: int) -> int:
        model = Attend()
        with Watch(model, every=1, rows=rows) as health:
            for _ in range(batches):
                model(torch.randn(1, 64, 8)).sum().backward()
            found = health._forwards
            sums = [part for one in found._found.values() for part in one.parts]
            gradients = [part for parts in found._gradients.rows.values() for part in parts]
            tensors = [*gradients, *(x for part in sums for x in (part.sums, part.maxima, *part.ordered.values()))]
            health.step()
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    heads, fixed = 2, 2 * (len(SUMS) + len(MAXIMA)) * 8  # the sums and the maxima of each head in float64
    assert held(None, 3) == 3 * (4 * 64 * heads * 4 + fixed)  # two statistics and two gradients of a row in float32
    assert held(4, 3) == 3 * (4 * 4 * heads * 4 + fixed)


def test_a_model_that_is_never_called() -> None:
    model = Attend()
    health = Watch(model)
    with pytest.warns(AttentionWarning, match="no forward pass of the model was seen"):
        one_step(health, lambda: None)
    assert health.samples[0].how == "not measured: no forward pass of the model was seen"


def test_a_model_without_attention() -> None:
    model = nn.Linear(8, 8)
    with pytest.warns(AttentionWarning, match="no attention ran in the model") as told:
        health = called(model, 3, every=1)
    assert len(told) == 1
    assert [sample.calls for sample in health.samples] == [(), (), ()]


def test_step_is_never_called() -> None:
    model = Attend()
    health = Watch(model)
    with pytest.warns(AttentionWarning, match=r"step\(\) was never called"), health:
        model(torch.randn(1, 3, 8))
    assert [alarm.name for alarm in health.alarms] == ["idle"]


def test_step_outside_the_block() -> None:
    health = Watch(Attend())
    with pytest.raises(InvalidValueError, match="inside the block"):
        health.step()


def test_an_evaluation_in_a_pause_does_not_count() -> None:
    model = Attend()
    with Watch(model, every=lambda step: step != 2) as health:
        model(torch.randn(1, 3, 8)).sum().backward()
        with health.paused(), health.paused():
            assert global_hooks() == {}
            model(torch.randn(1, 9, 8)).sum().backward()
        model(torch.randn(1, 2, 8)).sum().backward()
        health.step()
        with health.paused():
            health.step()
            assert global_hooks() == {}
        model(torch.randn(1, 4, 8))
        health.step()
    assert [call.columns["rows"][0] for sample in health.samples for call in sample.calls] == [5.0, 4.0]
    assert [len(parts) for parts in health._forwards._gradients.rows.values()] == []


def test_steps_that_are_not_sampled_run_without_a_hook() -> None:
    model = Attend()
    with Watch(model, every=3) as health:
        hooks = []
        for _ in range(6):
            hooks.append(bool(global_hooks()))
            model(torch.randn(1, 3, 8))
            health.step()
    assert hooks == [True, False, True, False, False, True]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"rows": 1}, InvalidValueError, "rows is a whole number from 2 on"),
        ({"rows": True}, InvalidValueError, "rows is a whole number from 2 on"),
        ({"rows": 8.0}, InvalidValueError, "rows is a whole number from 2 on"),
        ({"every": 0}, InvalidValueError, "whole number from 1 on"),
        ({"every": "often"}, InvalidTypeError, "a number of steps, a schedule, or a function"),
        ({"on_alarm": "shout"}, InvalidValueError, 'on_alarm is "warn", "raise" or a function'),
        ({"on_alarm": None}, InvalidValueError, 'on_alarm is "warn", "raise" or a function'),
        ({"first_step": 0}, InvalidValueError, "first_step is a whole number from 1 on"),
        ({"first_step": False}, InvalidValueError, "first_step is a whole number from 1 on"),
        ({"scaler": 1024.0}, InvalidTypeError, "scaler is a torch.amp.GradScaler"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        watch(Attend(), **options)


def test_what_is_no_model() -> None:
    with pytest.raises(InvalidTypeError, match=r"takes an nn\.Module, got function"):
        watch(lambda x: x)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("loss", "error"), [(torch.zeros(2), InvalidValueError), ("1.5e", InvalidTypeError), ([1.0], InvalidTypeError)]
)
def test_a_loss_that_is_no_number(loss: Any, error: type[Exception]) -> None:
    with Watch(model := Attend()) as health:
        model(torch.randn(1, 3, 8))
        with pytest.raises(error, match="a loss is"):
            health.step(loss)
        health.step(torch.ones(1, 1))
    assert [(sample.step, sample.loss) for sample in health.samples] == [(1, 1.0)]


def test_a_loss_that_is_overwritten_later_is_the_one_of_its_step(tmp_path: Path) -> None:
    model, loss = Attend(), torch.tensor(2.0)
    with Watch(model, to=tmp_path / "run") as health:
        for _ in range(3):
            model(torch.randn(1, 3, 8))
            health.step(loss)
            loss += 1.0
    assert read_run(tmp_path / "run").steps["loss"].to_pylist() == [2.0, 3.0, 4.0]


def test_a_schedule_that_raises_is_told_once_and_ends_no_training() -> None:
    def every(step: int) -> bool:
        if step in (3, 5):
            raise Boom("no such step")
        return True

    model = Attend()
    with pytest.warns(AttentionWarning, match="step 3 was not sampled, the schedule failed: Boom") as told:
        health = called(model, 6, every=every)
    assert len(told) == 1
    assert [sample.step for sample in health.samples] == [1, 2, 4, 6]


def alarming() -> nn.Module:
    model = Attend()
    with torch.no_grad():
        model.qkv.weight *= 100.0
    return model


def test_an_alarm_that_raises_leaves_the_watch_whole() -> None:
    model = alarming()
    with Watch(model, every=1, on_alarm="raise") as health:
        for _ in range(3):
            model(torch.randn(1, 3, 8))
            with nullcontext() if health.samples else pytest.raises(AttentionAlarm, match="logit"):
                health.step()
    assert [sample.step for sample in health.samples] == [1, 2, 3]


def test_alarms_go_to_a_function() -> None:
    told: list[Alarm] = []
    model = alarming()
    with Watch(model, on_alarm=told.append) as health:
        model(torch.randn(1, 3, 8))
        health.step()
    assert told == health.alarms
    assert told[0].name == "max_logit"


def test_a_warning_points_at_the_loop() -> None:
    model = alarming()
    with warnings.catch_warnings(record=True) as told, Watch(model) as health:
        warnings.simplefilter("always")
        model(torch.randn(1, 3, 8))
        health.step()
    assert {warning.filename for warning in told} == {__file__}


@pytest.mark.parametrize("samples", [1, 100])
def test_a_full_disk_is_told_once_and_what_was_not_written_is_written_later(
    samples: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "SAMPLES", samples)
    write, full = journal.RunWriter.write, [True]

    def fill(self: Any, *args: Any) -> None:
        if full[0]:
            raise OutputError("no space left", hint="Make room.")
        write(self, *args)

    monkeypatch.setattr(journal.RunWriter, "write", fill)
    model, told = Attend(), []
    with Watch(model, every=1, to=tmp_path / "run", on_alarm=told.append) as health:
        for step in range(6):
            full[0] = step < 4
            model(torch.randn(1, 3, 8))
            health.step(float(step))
    assert [alarm.name for alarm in told] == (["records"] if samples == 1 else [])
    run = read_run(tmp_path / "run")
    assert run.steps["step"].to_pylist() == [1, 2, 3, 4, 5, 6]
    assert run.heads["step"].to_pylist() == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    assert run.alarms["name"].to_pylist() == [alarm.name for alarm in told]


def test_a_disk_that_stays_full_is_told_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(self: Any, *args: Any) -> None:
        raise OutputError("no space left", hint="Make room.")

    model = Attend()
    monkeypatch.setattr(journal.RunWriter, "write", fill)
    with pytest.warns(AttentionWarning, match="no space left"):
        called(model, to=tmp_path / "run")
    with Watch(model), pytest.raises(InvalidValueError, match="one watch"), Watch(model):
        pass


def test_the_folder_of_another_run(tmp_path: Path) -> None:
    with Watch(model := Attend(), to=tmp_path / "run") as health:
        model(torch.randn(1, 3, 8))
        health.step()
    other = nn.Sequential(Attend())
    with pytest.raises(Exception, match="model") as told, Watch(other, to=tmp_path / "run"):
        pass
    assert type(told.value).__module__ == "sqrtdk.errors"
    with Watch(other):
        pass


def test_a_run_goes_on_in_its_folder(tmp_path: Path) -> None:
    for _ in range(2):
        with Watch(model := Attend(), every=2, to=tmp_path / "run") as health:
            for _ in range(3):
                model(torch.randn(1, 3, 8))
                health.step(1.0)
    run = read_run(tmp_path / "run")
    assert run.steps["step"].to_pylist() == [1, 2, 3, 4, 5, 6]
    assert run.steps["sampled"].to_pylist() == [True, True, False, True, False, True]


def test_a_sample_of_a_step_that_goes_on_from_a_checkpoint() -> None:
    with Watch(model := Attend(), every=10, first_step=498) as health:
        for _ in range(5):
            model(torch.randn(1, 3, 8))
            health.step()
    assert [sample.step for sample in health.samples] == [500]
    assert isinstance(health.samples[0], StepSample)

"""A model is left as it was: whatever its forward writes, every question that is asked of it puts everything back."""

from __future__ import annotations

import itertools
import os
import random
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sqrtdk
from sqrtdk import laws
from sqrtdk.kv.forecast import kv_forecast
from sqrtdk.models import tensor_state
from sqrtdk.models.unchanged import unchanged
from sqrtdk.recording.record import record
from tests.models.causal_attention import WIDTH, Attention


class Slotted:
    __slots__ = ("steps",)

    def __init__(self) -> None:
        self.steps = 0


class Model(nn.Module):
    """An attention behind something that a user's forward does."""

    total = 0
    shared: ClassVar[dict[str, Any]] = {}

    def __init__(self, touch: Callable[[Any, Tensor], Any], **held: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = Attention()
        self.touch = touch
        for name, value in held.items():
            is_buffer = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
            self.register_buffer(name, value) if is_buffer else setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        made = self.touch(self, x)
        return self.attention(made if isinstance(made, Tensor) and made.shape == x.shape else x)


def gain() -> nn.Parameter:
    return nn.Parameter(torch.ones(4))


def backward(model: Any, x: Tensor) -> None:
    with torch.enable_grad():
        model.attention.qkv(x.detach()).sum().backward()


def changed_settings(_: Any, x: Tensor) -> None:
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = True
    os.environ["LEFT_BY_A_MODEL"] = "1"
    warnings.simplefilter("always")
    np.seterr(all="ignore")


def count_up(model: Any, _: Tensor) -> None:
    type(model).total += 1
    model.shared[str(len(model.shared))] = 1


# What a forward does, and what it does that to.
KINDS: dict[str, tuple[Callable[[Any, Tensor], Any], dict[str, Any]]] = {
    "a buffer in place": (lambda m, x: m.n.add_(1), {"n": torch.zeros(())}),
    "a buffer assigned": (lambda m, x: setattr(m, "n", m.n + 1), {"n": torch.zeros(())}),
    "a buffer that grows": (lambda m, x: setattr(m, "n", torch.cat([m.n, x.mean(1)])), {"n": torch.zeros(0, WIDTH)}),
    "a buffer resized": (lambda m, x: m.n.resize_(m.n.numel() + 1).fill_(1.0), {"n": torch.zeros(1)}),
    "a buffer made": (lambda m, x: m.register_buffer("late", x.mean()), {}),
    "a buffer that becomes an input": (lambda m, x: setattr(m, "n", x), {"n": torch.zeros(())}),
    "a weight by data": (lambda m, x: m.w.data.mul_(0.5), {"w": gain()}),
    "a weight's data set": (lambda m, x: setattr(m.w, "data", m.w.data.half()), {"w": gain()}),
    "a weight copied into": (lambda m, x: m.w.copy_(m.w * 0.9), {"w": gain()}),
    "a weight by foreach": (lambda m, x: torch._foreach_mul_([m.w.data], 0.5), {"w": gain()}),
    "a weight by numpy": (lambda m, x: np.multiply(m.w.detach().numpy(), 2, out=m.w.detach().numpy()), {"w": gain()}),
    "a weight that needs no gradient": (lambda m, x: m.w.requires_grad_(False), {"w": gain()}),
    "a count": (lambda m, x: setattr(m, "n", m.n + 1), {"n": 0}),
    "an attribute made": (lambda m, x: setattr(m, "last", x), {}),
    "an attribute lost": (lambda m, x: vars(m).pop("n", None), {"n": 0}),
    "a list": (lambda m, x: m.log.append(x), {"log": []}),
    "a dict of lists": (lambda m, x: m.log["a"].append(1), {"log": {"a": []}}),
    "a set and a queue": (lambda m, x: (m.a.add(id(x)), m.b.append(1)), {"a": set(), "b": deque([0], maxlen=3)}),
    "a plain object": (lambda m, x: setattr(m.cache, "keys", x), {"cache": SimpleNamespace(keys=None)}),
    "an object with slots": (lambda m, x: setattr(m.cache, "steps", m.cache.steps + 1), {"cache": Slotted()}),
    "a tensor in an object": (lambda m, x: m.cache.keys.add_(1), {"cache": SimpleNamespace(keys=torch.zeros(3))}),
    "an array": (lambda m, x: np.add(m.a, 1, out=m.a), {"a": np.zeros(3)}),
    "a class": (count_up, {}),
    "a module built": (lambda m, x: setattr(m, "late", nn.Linear(2, 2)), {}),
    "a generator of torch": (lambda m, x: torch.rand(1, generator=m.g), {"g": torch.Generator()}),
    "a generator of numpy": (lambda m, x: m.g.random(), {"g": np.random.default_rng(1)}),
    "a generator of Python": (lambda m, x: m.g.random(), {"g": random.Random(1)}),
    "all random states": (lambda m, x: (torch.rand(1), np.random.rand(), random.random()), {}),
    "a backward": (backward, {}),
    "gradients set to None": (lambda m, x: m.zero_grad(), {}),
    "a hook": (lambda m, x: m.attention.register_forward_hook(lambda *_: None), {}),
    "the input": (lambda m, x: x.mul_(2), {}),
    "settings of the process": (changed_settings, {}),
}  # fmt: skip


def numbers(tensor: Tensor) -> Any:
    if tensor.layout is torch.jagged:
        return numbers(tensor.values())
    if tensor.is_nested:
        return [numbers(part) for part in tensor.unbind()]
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return str(dense.dtype), tuple(dense.shape), (dense.dequantize() if dense.is_quantized else dense).tolist()


def picture(value: Any, seen: dict[int, Any] | None = None) -> Any:
    """Return a value with everything in it as plain data, with the identity of every tensor and container."""
    seen = {} if seen is None else seen
    if id(value) in seen or (callable(value) and not isinstance(value, nn.Module)):
        return id(value)
    if isinstance(value, int | float | str | None):
        return value
    seen[id(value)] = value
    if isinstance(value, Tensor):
        grad = None if value.grad is None else picture(value.grad, seen)
        version = None if value.is_inference() else value._version
        return id(value), numbers(value.detach()), version, value.requires_grad, grad
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return str(value.bit_generator.state)
    if isinstance(value, np.ndarray):
        return id(value), value.tolist()
    if isinstance(value, dict):
        return id(value), [(key, picture(entry, seen)) for key, entry in value.items()]
    if isinstance(value, list | tuple | deque):
        return id(value), [picture(entry, seen) for entry in value]
    if isinstance(value, Slotted):
        return value.steps
    return id(value), picture(vars(value), seen) if hasattr(value, "__dict__") else repr(value)


def process() -> Any:
    numpy = np.random.get_state()
    return (
        torch.get_rng_state().tolist(), random.getstate(), str(numpy), torch.get_default_dtype(), dict(os.environ),
        torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark, list(warnings.filters),
        np.geterr(), torch.is_grad_enabled(), Model.total, dict(Model.shared),
    )  # fmt: skip


def everything(model: nn.Module, x: Tensor) -> Any:
    return picture(model), list(model.state_dict()), picture(x), process()


def ways(folder: Path) -> dict[str, Callable[[nn.Module, Tensor], Any]]:
    other = Model(lambda m, x: None)
    return {
        "check": lambda model, x: sqrtdk.check(model, x, laws="none"),
        "laws": lambda model, x: laws.ask(model, x, laws="finite,samples,causal,modes"),
        "diff": lambda model, x: sqrtdk.diff(model, other, x),
        "kv": lambda model, x: kv_forecast(model, x, kv_dtype="int8"),
        "record": lambda model, x: record(model, x, folder / "run.safetensors", force=True),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_everything_is_put_back(kind: str, tmp_path: Path) -> None:
    touch, held = KINDS[kind]
    model = Model(touch, **held)
    Attention.forward(model.attention, torch.randn(1, 3, WIDTH)).sum().backward()  # gradients of the user's own
    x = torch.randn(2, 9, WIDTH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for way, ask in ways(tmp_path).items():
            before = everything(model, x)
            ask(model, x)
            assert everything(model, x) == before, way


def test_the_input_of_one_side_is_not_that_of_the_other() -> None:
    """`x.mul_(2)` in A must not double the input of B, nor that of a run that comes behind."""
    report = sqrtdk.diff(Model(lambda m, x: x.mul_(2)), Model(lambda m, x: x.mul_(2)), torch.randn(2, 9, WIDTH))
    assert report.same


def test_views_of_one_tensor_stay_views_of_one_tensor() -> None:
    seen = []
    whole = torch.randn(4, 12, WIDTH)
    rows, same = whole[1:3, 2:11], whole[1:3, 2:11].requires_grad_(False)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention()

        def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
            seen.append((x.stride() == rows.stride(), x is z, x.untyped_storage() is not rows.untyped_storage()))
            x[:, 0] = 5
            assert bool((y[:, 0] == 5).all())
            return self.attention(x)

    before = whole.clone()
    sqrtdk.check(Two(), (rows, same, rows), laws="none")
    assert set(seen) == {(True, True, True)}
    assert torch.equal(whole, before)


ODD: dict[str, Callable[[], Tensor]] = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "compressed rows": lambda: torch.eye(3).to_sparse_csr(),
    "compressed columns": lambda: torch.eye(3).to_sparse_csc(),
    "blocks": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
    "float8": lambda: torch.ones(4).to(torch.float8_e4m3fn),
    "complex": lambda: torch.ones(4, dtype=torch.complex64),
    "mkldnn": lambda: torch.ones(4, 4).to_mkldnn(),
    "shared memory": lambda: torch.ones(1).expand(4),
}


def doubled(model: Any, _: Tensor) -> None:
    tensor = model.odd
    if tensor.is_quantized or tensor.itemsize == 1:
        tensor.copy_(torch.zeros(4))
    elif tensor.layout in (torch.jagged, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr):
        tensor.values().mul_(2)
    elif tensor.layout is torch.strided and not tensor.is_nested:
        tensor[:1].mul_(2)  # one number, shared by the others
    else:
        tensor.mul_(2)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ODD)
def test_a_buffer_of_any_layout(kind: str) -> None:
    """openai-whisper's alignment heads are a sparse buffer."""
    model, x = Model(doubled, odd=ODD[kind]()), torch.randn(2, 6, WIDTH)
    before = id(model.odd), numbers(model.odd)
    report = laws.ask(model, x, laws="finite,causal,modes")
    assert {answer.state for answer in report.answers if answer.law == "finite"} == {"kept"}
    sqrtdk.check(model, x, laws="none")
    assert (id(model.odd), numbers(model.odd)) == before


class Returns(nn.Module):
    def __init__(self, made: Callable[[], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.made = Attention(), made

    def forward(self, x: Tensor, extra: Any = None) -> Any:
        return self.attention(x), self.made()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [*ODD, "meta"])
def test_inputs_and_outputs_of_any_layout(kind: str, tmp_path: Path) -> None:
    make = ODD.get(kind, lambda: torch.ones(3, device="meta"))
    x = torch.randn(2, 6, WIDTH)
    inputs = (x,) if kind == "meta" else (x, make())
    report = laws.ask(Returns(make), inputs, laws="finite,causal")
    assert {answer.state for answer in report.answers} == {"kept"}
    assert not sqrtdk.check(Returns(make), inputs, laws="none").findings
    assert sqrtdk.diff(Returns(make), Returns(make), inputs).same
    assert record(Returns(make), inputs, tmp_path / "run.safetensors").calls == 1


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_a_run_that_ends_in_the_middle(stop: type[BaseException]) -> None:
    def touch(model: Any, x: Tensor) -> None:
        model.n.add_(1)
        model.steps += 1
        if model.steps > 3:
            raise stop

    model, x = Model(touch, n=torch.zeros(()), steps=0), torch.randn(2, 6, WIDTH)
    before = everything(model, x)
    if stop is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            laws.ask(model, x)
    else:
        laws.ask(model, x)
    assert everything(model, x) == before


def test_what_cannot_be_put_back_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A position in an iterator; and weights of which there is no room for a copy."""
    x = torch.randn(2, 6, WIDTH)
    model = Model(lambda m, x: next(m.steps), steps=itertools.count())
    said = "forward changed steps, which could not be put back: go on with another copy of the model"
    assert said in sqrtdk.check(model, x, laws="none").environment["notes"]
    assert laws.ask(model, x, laws="finite").notes == (said,)
    assert kv_forecast(model, x, kv_dtype="int8").notes == (said,)
    assert said in record(model, x, tmp_path / "run.safetensors").notes
    assert f"A: {said}" in sqrtdk.diff(model, Model(lambda m, x: None), x).environment["notes"]
    monkeypatch.setattr(tensor_state, "MOST_COPIED_BYTES", 64)
    model = Model(lambda m, x: (m.attention.qkv.weight.data.mul_(2), m.n.add_(1)), n=torch.zeros(2))
    notes = laws.ask(model, x, laws="finite").notes
    assert notes == (said.replace("steps", "attention.qkv.weight"),)
    assert model.n.tolist() == [0, 0]  # the small ones have room


def test_a_model_that_counts_goes_on_counting_between_runs() -> None:
    """Otherwise nobody would see that its outputs differ from run to run."""
    counts = []
    model = Model(lambda m, x: (m.n.add_(1), counts.append(int(m.n))), n=torch.zeros(()))
    sqrtdk.check(model, torch.randn(2, 6, WIDTH), laws="none")
    assert counts == list(range(1, len(counts) + 1))
    assert int(model.n) == 0


def test_tied_and_inference_tensors() -> None:
    with torch.inference_mode():
        model = Model(lambda m, x: m.w.data.numpy().fill(7), w=gain())
        model.tied = model.w
        x = torch.randn(2, 6, WIDTH)
    laws.ask(model, x, laws="finite")
    assert model.w.tolist() == [1, 1, 1, 1]
    assert model.tied is model.w


def test_a_hook_of_the_user_goes_on_seeing() -> None:
    """It observes the model, as we do, and what it saw is its own."""
    model, seen = Model(lambda m, x: None), []
    model.register_forward_hook(lambda *_: seen.append(1))
    sqrtdk.check(model, torch.randn(2, 6, WIDTH), laws="none")
    assert seen


def test_what_a_block_did_not_touch_is_not_written() -> None:
    model = Model(lambda m, x: None)
    with unchanged(model):
        versions = [parameter._version for parameter in model.parameters()]
    assert [parameter._version for parameter in model.parameters()] == versions

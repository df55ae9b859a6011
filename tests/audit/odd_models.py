"""Models of strangers, one function a kind: each takes the scale, and gives the model with its inputs."""

from __future__ import annotations

import functools
import threading
import unittest.mock
import warnings
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import prune

ROOT = 8**-0.5  # 4 heads of 8


def inputs() -> torch.Tensor:
    return torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(0))


class Attention(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.q, self.k, self.v, self.number = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32), scale

    def forward(self, x: Any) -> Any:
        q, k, v = (part(x).unflatten(-1, (4, 8)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return ((q @ k.mT * self.number).softmax(-1) @ v).transpose(1, 2).flatten(2)


class Net(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Any) -> Any:
        for part in self.parts:
            x = x + part(x)
        return x


class Scriptable(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.qkv, self.number = nn.Linear(32, 96), scale

    def forward(self, x):
        qkv = self.qkv(x).unflatten(-1, [3, 4, 8]).permute(2, 0, 3, 1, 4)
        weights = (qkv[0] @ qkv[1].transpose(-1, -2) * self.number).softmax(-1)
        return (weights @ qkv[2]).transpose(1, 2).flatten(2)


# --- what it answers when it is asked ---


class Anything:
    """It is every number of its own items, and each of them is itself."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self

    def __getitem__(self, key: Any) -> Any:
        return self


def answering(answer: Any) -> type[Attention]:
    """A model that gives `answer(self, name)` for whatever it does not have."""

    class Answering(Attention):
        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                pass
            return answer(self, name)

    return Answering


def raising(error: type[BaseException]) -> type[Attention]:
    def answer(model: nn.Module, name: str) -> Any:
        raise error(name)

    return answering(answer)


GETATTR = {
    "itself": answering(lambda model, name: model),
    "none": answering(lambda model, name: None),
    "an object that answers anything": answering(lambda model, name: Anything()),
    "a mock": answering(lambda model, name: unittest.mock.MagicMock()),
    "a function": answering(lambda model, name: lambda *arguments, **options: None),
    "a RuntimeError": raising(RuntimeError),
    "a RecursionError": raising(RecursionError),
    "a MemoryError": raising(MemoryError),
    "recursion without end": answering(lambda model, name: getattr(model, name + "_")),
}


def with_property(name: str, read: Any, write: Any = None) -> type[Attention]:
    return type("Property", (Attention,), {name: property(read, write)})


def _no(*_: Any) -> Any:
    raise RuntimeError("no")


def _leave(*_: Any) -> Any:
    raise SystemExit(0)


PROPERTIES = {
    "config that exits": with_property("config", _leave),
    "config that is a mock": with_property("config", lambda model: unittest.mock.MagicMock()),
    "config that is the model": with_property("config", lambda model: model),
    "hf_device_map that is a mock": with_property("hf_device_map", lambda model: unittest.mock.MagicMock()),
    "hf_device_map of the class": type("Mapped", (Attention,), {"hf_device_map": {"": "cpu"}}),
    "training that can't be read": with_property("training", _no, lambda model, value: None),
    "training that stays on": with_property("training", lambda model: True, lambda model, value: None),
}

OVERRIDES: dict[str, dict[str, Any]] = {
    "bool and len that raise": {"__bool__": _no, "__len__": _no},
    "a length of 0": {"__len__": lambda self: 0},
    "repr that raises": {"__repr__": _no},
    "equality that is a tensor": {"__eq__": lambda self, other: torch.ones(2), "__hash__": lambda self: 0},
    "eval that returns nothing": {"eval": lambda self: self.train(False) and None},
    "train that raises": {"train": _no, "eval": _no},
    "state_dict that raises": {"state_dict": _no},
    "requires_grad_ that raises": {"requires_grad_": _no},
}


def overriding(name: str) -> type[Attention]:
    return type("Overriding", (Attention,), OVERRIDES[name])


# --- what its weights are ---


def sparse(scale: float, layout: str) -> Any:
    model = Attention(scale)
    convert = {
        "coo": torch.Tensor.to_sparse,
        "csr": torch.Tensor.to_sparse_csr,
        "csc": torch.Tensor.to_sparse_csc,
        "bsr": functools.partial(torch.Tensor.to_sparse_bsr, blocksize=(4, 4)),
    }[layout]
    for part in (model.q, model.k, model.v):
        part.weight = nn.Parameter(convert(part.weight.detach()), requires_grad=False)
    return model, inputs()


def script(scale: float, kind: str, inside: bool) -> Any:
    made: Any = Scriptable(scale).eval()
    made = torch.jit.trace(made, inputs()) if "trace" in kind else torch.jit.script(made)
    if "frozen" in kind:
        made = torch.jit.freeze(made)
    if "optimized" in kind:
        made = torch.jit.optimize_for_inference(made)
    return (Net(made) if inside else made), inputs()


def dynamically_quantised(scale: float, dtype: torch.dtype) -> Any:
    return torch.ao.quantization.quantize_dynamic(Attention(scale), {nn.Linear}, dtype=dtype), inputs()


def made_in_inference_mode(scale: float, weights: bool, rows: bool, runs: bool) -> Any:
    class Inferring(Attention):
        def forward(self, x: Any) -> Any:
            with torch.inference_mode():
                return super().forward(x)

    with torch.inference_mode(weights):
        model = (Inferring if runs else Attention)(scale)
    with torch.inference_mode(rows):
        return model, inputs()


def parametrised(scale: float) -> Any:
    model = Attention(scale)
    nn.utils.parametrize.register_parametrization(model.q, "weight", nn.Tanh())
    nn.utils.parametrizations.weight_norm(model.k)
    prune.l1_unstructured(model.v, "weight", 0.5)
    return model, inputs()


def tied(scale: float) -> Any:
    model = Net(Attention(scale), Attention(scale))
    model.parts[1].q = model.parts[0].q
    model.parts[1].k.weight = model.parts[0].k.weight
    return model, inputs()


def shared(scale: float) -> Any:
    one = Attention(scale)
    return Net(one, one), inputs()


def half_on_meta(scale: float) -> Any:
    return Net(Attention(scale), Attention(scale).to("meta")), inputs()


def lazy(scale: float) -> Any:
    model = Attention(scale)
    model.q, model.k = nn.LazyLinear(32), nn.LazyLinear(32)
    return model, inputs()


def fake(scale: float, rows: bool) -> Any:
    with FakeTensorMode():
        model, made = Attention(scale), inputs() if rows else None
    return model, inputs() if made is None else made


class Bare(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.number = scale

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        return (q @ k.mT * self.number).softmax(-1) @ v


def bare(scale: float) -> Any:
    return Bare(scale), tuple(torch.randn(3, 1, 4, 6, 8))


# --- what its forward gives ---


def returning(result: Any) -> type[Attention]:
    class Returning(Attention):
        def forward(self, x: Any) -> Any:
            return result(self, super().forward(x))

    return Returning


def in_itself(y: Any) -> Any:
    held: list[Any] = [y]
    held.append(held)
    return held


class OddMapping(dict[str, Any]):
    def values(self) -> Any:
        raise RuntimeError("no")


RESULTS = {
    "nothing": returning(lambda model, y: None),
    "itself": returning(lambda model, y: model),
    "a generator": returning(lambda model, y: (part for part in [y])),
    "a list that holds itself": returning(lambda model, y: in_itself(y)),
    "a mapping that raises": returning(lambda model, y: OddMapping(y=y)),
    "a mock": returning(lambda model, y: unittest.mock.MagicMock()),
    "a view of its input": returning(lambda model, y: y.view_as(y)),
    "a sparse tensor": returning(lambda model, y: y.to_sparse()),
    "a nested tensor": returning(lambda model, y: torch.nested.nested_tensor([y[0], y[0, :2]])),
}


class Generating(Attention):
    def forward(self, x: Any) -> Any:
        yield super().forward(x)


class Threaded(Attention):
    def forward(self, x: Any) -> Any:
        rows: list[Any] = []
        thread = threading.Thread(target=lambda: rows.append(Attention.forward(self, x)))
        thread.start()
        thread.join()
        return rows[0]


class Failing(Attention):
    def __init__(self, error: BaseException) -> None:
        super().__init__(1.0)
        self.error = error

    def forward(self, x: Any) -> Any:
        raise self.error


# --- what its parts are ---


def cyclic(scale: float) -> Any:
    model = Net(Attention(scale))
    model.parts[0].top = model
    return model, inputs()


def without(scale: float, name: str) -> Any:
    model = Attention(scale)
    del model._modules[name]
    return model, inputs()


class Uninitialised(nn.Module):
    def __init__(self) -> None:
        pass

    def forward(self, x: Any) -> Any:
        return x


class Frozen(Attention):
    """No attribute can be set once it is made."""

    def __init__(self, scale: float) -> None:
        super().__init__(scale)
        self.__dict__["ready"] = True

    def __setattr__(self, name: str, value: Any) -> None:
        if "ready" in self.__dict__:
            raise RuntimeError("no")
        super().__setattr__(name, value)


def nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.randn(4, 32), torch.randn(6, 32)], layout=layout)


class Fused(Attention):
    def forward(self, x: Any) -> Any:
        q, k, v = (part(x).unflatten(-1, (4, 8)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return nn.functional.scaled_dot_product_attention(q, k, v, scale=self.number)


def nan_weights(scale: float) -> Any:
    model = Attention(scale)
    with torch.no_grad():
        model.v.weight.fill_(float("nan"))
    return model, inputs()


# --- factories, by name ---


def raises_generator_exit() -> Any:
    raise GeneratorExit("stop")


def raises_system_exit() -> Any:
    raise SystemExit(0)


def raises_base() -> Any:
    raise BaseException("stop")


def raises_stop_iteration() -> Any:
    raise StopIteration


def gives_nothing() -> Any:
    return overriding("eval that returns nothing")(ROOT).eval()


def gives_nothing_with_inputs() -> Any:
    return overriding("eval that returns nothing")(ROOT).eval(), inputs()


def gives_a_generator() -> Any:
    yield Attention(ROOT)


def gives_a_class() -> Any:
    return Attention


async def is_awaited() -> Any:
    return Attention(ROOT)


def moves_to_nothing() -> Any:
    return type("Moved", (Attention,), {"to": lambda self, *arguments: None})(ROOT), inputs()


def right() -> Any:
    return overriding("eval that returns nothing")(ROOT), inputs()


def missing() -> Any:
    return overriding("eval that returns nothing")(1.0), inputs()


def quiet(make: Any, *arguments: Any) -> Any:
    """What a maker gives; torch warns of much that strangers still use."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(*arguments)

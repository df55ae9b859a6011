"""A trace changes nothing: outputs, gradients, random numbers, parameters, hooks and global state are as without it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import sqrtdk
from tests.attentions.cases import CASES
from tests.attentions.each import each
from tests.attentions.styles import Case
from tests.hf.families import FAMILIES


def global_state() -> dict[str, Any]:
    """Whatever a careless observer would leave switched."""
    hooks = {name: len(value) for name, value in vars(torch_module).items() if name.startswith("_global") and value}
    return {
        "global hooks": {name: n for name, n in hooks.items() if isinstance(n, int)},
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "function modes": len(_get_current_function_mode_stack()),
        "dispatch modes": len(_get_current_dispatch_mode_stack()),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "stance": stance(),
        "sdpa": (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()),
    }


def stance() -> str:
    """What `torch.compile` does now."""
    import torch._dynamo.eval_frame as eval_frame

    return str(eval_frame._stance.stance)


def module_state(model: nn.Module) -> dict[str, Any]:
    """Attributes, hooks, and identity, version and values of every tensor of every module."""
    state: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            keys = list(value) if isinstance(value, dict) else id(value)
            state[f"{path}.{name}"] = keys
        state[f"{path} forward"] = module.__class__, module.forward.__func__
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        state[name] = id(tensor), tensor._version, tensor.data_ptr(), tensor.requires_grad
    return state


def tensors(value: Any) -> list[Tensor]:
    """Every tensor in an output, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in tensors(item)]
    return []


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Global and module state after the block is what it was before."""
    before = global_state(), module_state(model)
    values = {name: t.clone() for name, t in model.state_dict().items()}
    yield
    assert global_state() == before[0]
    assert module_state(model) == before[1]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.nan_to_num(), values[name].nan_to_num())


def run_once(made: Case, around: Callable[[], contextlib.AbstractContextManager[Any]]) -> tuple[list[Tensor], Tensor]:
    """Outputs and gradients of one seeded run, and the state of the random numbers after it."""
    torch.manual_seed(7)
    made.model.zero_grad()
    with around():
        found = tensors(made.run())
    state = torch.get_rng_state()
    loss = sum(t.float().square().sum() for t in found if t.requires_grad)
    if isinstance(loss, Tensor):
        loss.backward()
    grads = [p.grad.clone() for p in made.model.parameters() if p.grad is not None]
    return [*(t.detach().clone() for t in found), *grads], state


def same(plain: tuple[list[Tensor], Tensor], observed: tuple[list[Tensor], Tensor]) -> None:
    assert len(plain[0]) == len(observed[0]) > 0
    for a, b in zip(plain[0], observed[0], strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a.nan_to_num(), b.nan_to_num())
    assert torch.equal(plain[1], observed[1])


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", CASES)
def test_outputs_gradients_and_state_are_bit_equal(name: str) -> None:
    made = CASES[name]()
    plain = run_once(made, contextlib.nullcontext)
    made.model.zero_grad()
    with unchanged(made.model):
        observed = run_once(made, lambda: sqrtdk.trace(made.model))
        made.model.zero_grad()
    same(plain, observed)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("family", "attention"),
    [
        *((family, how) for family in ("gpt2", "llama", "deepseek_v3", "bert", "t5") for how in ("eager", "sdpa")),
        ("gemma2", "eager"),
    ],
)
def test_transformers_models_are_bit_equal(family: str, attention: str) -> None:
    config = FAMILIES[family]()
    model = transformers.AutoModel.from_config(config, attn_implementation=attention).train()
    ids = torch.randint(3, 150, (2, 12))
    more = {"decoder_input_ids": ids} if family == "t5" else {}
    made = Case(model, (ids,), [], {**more, "attention_mask": torch.ones_like(ids)})
    plain = run_once(made, contextlib.nullcontext)
    made.model.zero_grad()
    with unchanged(model):
        observed = run_once(made, lambda: sqrtdk.trace(model))
        made.model.zero_grad()
    same(plain, observed)


class Raises(nn.Module):
    """An attention that fails before its softmax, after it, or in a module behind it."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.inner(x, x, x, need_weights=False)
        z = self.q(y) @ self.k(y).mT * 8**-0.5
        self.stop("product")
        w = z.softmax(-1)
        self.stop("softmax")
        out = w @ x
        self.stop("value")
        return out

    def stop(self, here: str) -> None:
        if self.where == here:
            raise KeyError(here)


@each("where, complete", [("product", 1), ("softmax", 1), ("value", 2)])
@each("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_a_model_that_raises_leaves_nothing_behind(where: str, complete: int, mode: Any) -> None:
    model = Raises(where)
    x = torch.randn(1, 5, 8)
    run = sqrtdk.trace(model)
    with unchanged(model):
        with pytest.raises(KeyError, match=where), run, mode():
            model(x)
        model.where = "product"
        with pytest.raises(KeyError):
            model(x)
        model.where = where
    assert len(run.calls) == complete  # what ran before the error is kept
    assert len(run.not_attention) == (where == "softmax")


def test_an_interrupt_leaves_nothing_behind() -> None:
    model = nn.MultiheadAttention(8, 2)
    with unchanged(model), pytest.raises(KeyboardInterrupt), sqrtdk.trace(model):
        raise KeyboardInterrupt


def test_hooks_of_the_model_still_run() -> None:
    """The user's hooks see what they always see, and may replace outputs."""
    layer = nn.Linear(4, 4)
    seen: list[str] = []
    layer.register_forward_pre_hook(lambda module, args: seen.append("before"))
    layer.register_forward_hook(lambda module, args, output: seen.append("after") or output + 1)
    x = torch.randn(2, 4)
    plain = layer(x)
    with sqrtdk.trace(layer):
        observed = layer(x)
    assert torch.equal(plain, observed)
    assert seen == ["before", "after"] * 2


def test_autocast_around_the_block_is_kept() -> None:
    """The same weight is cast once within an autocast region, traced or not, and its gradient is the same."""
    layer = nn.Linear(8, 8)
    x = torch.randn(2, 8)

    def step(around: Callable[[], contextlib.AbstractContextManager[Any]]) -> tuple[Tensor, Tensor]:
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            first = layer(x)
            with around():
                second = layer(first)
            third = layer(second)
        third.float().sum().backward()
        assert layer.weight.grad is not None
        return third.detach(), layer.weight.grad.clone()

    for a, b in zip(step(contextlib.nullcontext), step(lambda: sqrtdk.trace(layer)), strict=True):
        assert torch.equal(a, b)


COMPILES_ITSELF = """
import sys, torch, sqrtdk

class Lazy(torch.nn.Linear):
    attend = None
    def forward(self, x):
        if self.attend is None and sys.argv[1] == "compiled":
            self.attend = torch.compile(lambda q, k: (q @ k.mT * 0.25).softmax(-1) @ k, backend="eager")
        q, k = super().forward(x).chunk(2, -1)
        return self.attend(q, k) if self.attend else (q @ k.mT * 0.25).softmax(-1) @ k

with sqrtdk.trace(model := Lazy(16, 32)) as run:
    model(torch.randn(2, 5, 16))
print([call.formula for call in run.calls], "torch._dynamo" in sys.modules)
"""


@pytest.mark.parametrize("how", ["plain", pytest.param("compiled", marks=pytest.mark.full)])
def test_the_compiler_is_imported_by_models_alone_and_passes_over_the_trace(how: str) -> None:
    """Of a model that compiles a part of itself while it is traced, that part is followed."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILES_ITSELF, how], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.split("] ")[0] == "['softmax(0.25 * q.k)'"
    assert done.stdout.endswith(f"{how == 'compiled'}\n")
    assert "recompile" not in done.stderr


def test_what_is_tried_on_other_numbers_draws_none() -> None:
    """An effect that no reader knows is replayed on other values: not where it draws, as the model's draws follow."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            q = torch.normal(self.q(x), 0.0)
            return (q @ self.k(x).mT / 8**0.5).softmax(-1) @ x

    torch.manual_seed(0)
    model, x = Noisy(), torch.randn(1, 5, 8)
    state = torch.get_rng_state()
    with torch.no_grad():
        model(x)
        plain = torch.get_rng_state()
        torch.set_rng_state(state)
        with sqrtdk.trace(model) as run:
            model(x)
    assert len(run.calls) == 1
    assert torch.equal(torch.get_rng_state(), plain)

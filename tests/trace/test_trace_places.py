"""A record names file and line of the product, of each factor, of each step and of the softmax."""

from __future__ import annotations

import importlib
import inspect
import linecache
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sqrtdk
from sqrtdk.tracing import AttentionCall
from sqrtdk.tracing.tape import places
from tests.attentions.each import each

PORT = """
import torch
from torch import nn
from torch.nn import functional as F
from {helper} import scaled, to_weights


class Attention(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.attend = attend

    def forward(self, x):
        q, k, v = (
            f(x).unflatten(-1, (4, 8)).transpose(1, 2)  # projection
            for f in (self.q, self.k, self.v)
        )
        return self.attend(self, q, k, v)


def by_hand(self, q, k, v):
    q = self.norm(q)  # norm
    q = q * 0.5  # factor on q
    k = k * 2.0  # factor on k
    logits = torch.matmul(  # product
        q, k.mT
    )
    logits = logits * 8**-0.5  # factor on logits
    logits = 2 * torch.tanh(  # times cap
        logits / 2  # by cap
    )
    visible = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).tril()
    logits = logits.masked_fill(~visible, -torch.inf)  # mask
    weights = logits.softmax(-1)  # softmax
    return weights @ v


def fused(self, q, k, v):
    q = q / 2  # factor on q
    return F.scaled_dot_product_attention(  # call
        q, k, v, scale=0.3
    )


def helped(self, q, k, v):
    return to_weights(scaled(q @ k.mT, 8)) @ v  # product


by_lambda = lambda self, q, k, v: (
    (q @ k.mT  # product
     * 0.25  # factor
    ).softmax(-1)  # softmax
    @ v
)
"""

HELPER = """
def scaled(logits, d):
    return logits / d  # factor: the square root is missing


def to_weights(logits):
    return logits.softmax(-1)  # softmax
"""


class Port:
    """The two files, imported, and the number of the line with a comment."""

    def __init__(self, home: Path) -> None:
        self.name, self.helper = f"port_{home.name}".replace("-", "_"), f"help_{home.name}".replace("-", "_")
        (home / f"{self.name}.py").write_text(PORT.format(helper=self.helper))
        (home / f"{self.helper}.py").write_text(HELPER)
        self.module: ModuleType = importlib.import_module(self.name)

    def at(self, function: str, comment: str) -> str:
        """`file:line` of the line of a function that ends in the comment."""
        lines, first = inspect.getsourcelines(getattr(self.module, function))
        (line,) = [first + i for i, text in enumerate(lines) if text.rstrip().endswith(f"# {comment}")]
        return f"{self.name}.py:{line}"

    def call(self, function: str, device: str = "cpu") -> AttentionCall:
        torch.manual_seed(0)
        with torch.device(device):
            model = self.module.Attention(getattr(self.module, function))
            x = torch.randn(2, 6, 32)
        return only(model, x)


def only(model: nn.Module, *inputs: Tensor) -> AttentionCall:
    with torch.no_grad(), sqrtdk.trace(model) as run:
        model(*inputs)
    (call,) = run.calls
    return call


@pytest.fixture
def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Port:
    monkeypatch.syspath_prepend(str(tmp_path))
    return Port(tmp_path)


def factors(call: AttentionCall) -> list[tuple[str, float | None, str | None]]:
    return [(f.where, None if f.value is None else round(f.value, 4), f.at) for f in call.scale.factors]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_every_line_of_an_attention_by_hand(port: Port, device: str) -> None:
    call = port.call("by_hand", device)
    at = lambda comment: port.at("by_hand", comment)  # noqa: E731
    assert (call.product_at, call.softmax_at) == (at("product"), at("softmax"))
    assert factors(call) == [
        ("q", 0.5, at("factor on q")),
        ("k", 2.0, at("factor on k")),
        ("logits", 0.3536, at("factor on logits")),
    ]
    stages = [(stage.where, stage.name, stage.at) for stage in call.stages]
    projection = port.at("Attention", "projection")
    assert stages == [
        ("q", "projection", projection),
        ("q", "norm", at("norm")),
        ("q", "scale", at("factor on q")),
        ("k", "projection", projection),
        ("k", "scale", at("factor on k")),
        ("logits", "product", at("product")),
        ("logits", "scale", at("factor on logits")),
        ("logits", "softcap", at("times cap")),
        ("logits", "mask", at("mask")),
    ]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_scale_argument_of_a_kernel_is_at_its_call(port: Port, device: str) -> None:
    call, line = port.call("fused", device), port.at("fused", "call")
    assert (call.kind, call.product_at, call.softmax_at) == ("sdpa", line, line)
    assert factors(call) == [("q", 0.5, port.at("fused", "factor on q")), ("op", 0.3, line)]


def test_a_mistake_in_a_helper_is_in_the_helper(port: Port) -> None:
    call = port.call("helped")
    lines = HELPER.splitlines()
    factor = next(i for i, text in enumerate(lines, 1) if "# factor" in text)
    softmax = next(i for i, text in enumerate(lines, 1) if "# softmax" in text)
    assert call.product_at == port.at("helped", "product")
    assert factors(call) == [("logits", 0.125, f"{port.helper}.py:{factor}")]
    assert call.softmax_at == f"{port.helper}.py:{softmax}"


def test_a_lambda_over_several_lines(port: Port) -> None:
    call = port.call("by_lambda")
    product, softmax = port.at("by_lambda", "product"), port.at("by_lambda", "softmax")
    assert (call.product_at, call.softmax_at) == (product, softmax)
    assert factors(call) == [("logits", 0.25, product)]  # Python notes where an expression begins


def test_code_that_was_never_in_a_file(port: Port) -> None:
    made: dict[str, Any] = {}
    exec("def attend(self, q, k, v):\n    z = q @ k.mT\n    return (z * 0.25).softmax(-1) @ v\n", made)
    call = only(port.module.Attention(made["attend"]), torch.randn(2, 6, 32))
    assert (call.product_at, call.softmax_at) == ("<string>:2", "<string>:3")
    assert factors(call) == [("logits", 0.25, "<string>:3")]


def test_packages_that_only_forward_are_passed_over() -> None:
    einops = pytest.importorskip("einops")

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (einops.rearrange(f(x), "b n (h d) -> b h n d", h=4) for f in (self.q, self.k, self.v))
            logits = einops.einsum(q * 8**-0.5, k, "b h i d, b h j d -> b h i j")
            return einops.einsum(logits.softmax(-1), v, "b h i j, b h j d -> b h i d")

    call = only(Attention(), torch.randn(2, 6, 32))
    first = inspect.getsourcelines(Attention.forward)[1]
    assert str(call.product_at).endswith(f"test_trace_places.py:{first + 2}")
    assert (call.softmax_at or "").endswith(f"test_trace_places.py:{first + 3}")
    assert {f.at for f in call.scale.factors} == {call.product_at}


@each(
    "attn, file, words",
    [
        ("eager", "transformers/models/llama/modeling_llama.py", ("torch.matmul(query", "* scaling", "softmax(")),
        ("sdpa", "transformers/integrations/sdpa_attention.py", ("scaled_dot_product_attention(",) * 3),
    ],
)
def test_the_lines_of_a_released_model(attn: str, file: str, words: tuple[str, ...]) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        attn_implementation=attn,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    call = only(model, torch.randint(64, (1, 6)))
    home = Path(transformers.__file__).parents[1]
    told = (call.product_at, call.scale.factors[-1].at, call.softmax_at)
    for at, word in zip(told, words, strict=True):
        path, _, line = str(at).rpartition(":")
        assert path == file
        assert word in linecache.getline(str(home / path), int(line))
    (rope, *_) = [stage.at for stage in call.stages if stage.name == "rope"]
    assert str(rope).startswith("transformers/models/llama/modeling_llama.py:")


def test_a_module_of_torch_is_told_where_nothing_else_ran() -> None:
    model = nn.TransformerEncoderLayer(32, 4, batch_first=True)
    (judged,) = sqrtdk.check(model, torch.randn(2, 6, 32)).calls
    assert re.fullmatch(r"torch/nn/[\w/]+\.py:\d+", str(judged.call.product_at))


def test_a_module_of_ours_is_told_where_it_is_called() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (f(x).unflatten(-1, (4, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
            return sqrtdk.attention(q, k, v)

    (judged,) = sqrtdk.check(Model(), torch.randn(2, 6, 32)).calls
    line = inspect.getsourcelines(Model.forward)[1] + 2
    assert str(judged.call.product_at).endswith(f"test_trace_places.py:{line}")
    (judged, *_) = sqrtdk.check("demo", seq_len=16).calls
    assert str(judged.call.product_at).startswith("sqrtdk/models/demo.py:")


def test_a_script_is_named_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "examples" / "mine.py"
    place = eval(compile("here()", str(script), "eval"), {"here": places.current_place})
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(script.parent))  # as Python does for a script
    assert places.place_text(place) == "mine.py:1"
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    assert places.place_text(place) == "examples/mine.py:1"


def test_the_line_is_the_one_that_runs(tmp_path: Path) -> None:
    def noted(work: Callable[[], places.Place | None]) -> tuple[str | None, int]:
        place, line = work(), inspect.currentframe().f_lineno  # type: ignore[union-attr]
        return places.place_text(place), line

    told, line = noted(lambda: places.current_place())
    assert str(told).endswith(f"test_trace_places.py:{line + 3}")
    assert places.place_text(None) is None


def test_a_path_is_absolute_only_where_nothing_leads_to_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = compile("here()", str(tmp_path / "lonely.py"), "eval")
    place = eval(code, {"here": places.current_place})
    assert places.place_text(place) == f"{tmp_path}/lonely.py:1"
    monkeypatch.chdir(tmp_path)
    assert places.place_text(place) == "lonely.py:1"
    monkeypatch.syspath_prepend(str(tmp_path.parent))
    assert places.place_text(place) == f"{tmp_path.name}/lonely.py:1"

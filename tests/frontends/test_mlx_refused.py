"""What is no model here: one error that says the rule, what came, and the fix; and nothing of the user's changes."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sqrtdk
from sqrtdk.errors import InvalidTypeError, InvalidValueError, MissingExtraError, ModelError, SqrtdkError
from sqrtdk.frontends import from_mlx
from tests.support.optional import optional
from tests.support.program import called

mx, nn = optional("mlx.core"), optional("mlx.nn")
array = mx.array  # skips where MLX is missing


def _weights() -> dict[str, Any]:
    return {name: mx.random.normal((16, 16), key=mx.random.key(n)) / 4 for n, name in enumerate("qkv")}


def _x() -> Any:
    return mx.random.normal((2, 6, 16), key=mx.random.key(9))


def _refused(function: Any, *inputs: Any, parameters: Any = None, kind: type[SqrtdkError] = ModelError) -> str:
    """The error's message and hint; both are there."""
    with pytest.raises(kind) as caught:
        from_mlx(function, _weights() if parameters is None else parameters, *(inputs or (_x(),)))
    assert caught.value.hint
    return f"{caught.value.message} {caught.value.hint}"


def test_every_unread_primitive_is_named_with_its_line() -> None:
    def fn(p: Any, x: Any) -> Any:
        y = mx.linalg.svd(x)[1]
        return mx.linalg.inv(p["q"]).sum() * y

    text = _refused(fn)
    assert "SVD" in text
    assert "Inverse" in text
    assert text.count("test_mlx_refused.py:") == 2


def test_what_mlx_can_t_export_is_named_with_its_line() -> None:
    """MLX stops at the first of them and tells no line; all are found by exporting each call alone."""

    def fn(p: Any, x: Any) -> Any:
        y = own(mx.logcumsumexp(x, 1))
        return mx.to_fp8(y @ p["q"]), mx.linalg.svd(x)[1]

    own = mx.custom_function(lambda x: x * 2)
    own.vjp(lambda primals, cotangent, output: cotangent)

    text = _refused(fn)
    assert "CumLogAddExp" in text
    assert "ToFP8" in text
    assert "SVD" in text
    assert "CustomTransforms" in text
    assert text.count("test_mlx_refused.py:") == 4


@pytest.mark.parametrize(
    ("function", "part"),
    [
        (lambda p, x: x if x.sum().item() > 0 else -x, "eval"),
        (lambda p, x: x @ p["missing"], "KeyError"),
        (lambda p: p, "takes 1 positional"),
    ],
)
def test_a_function_that_mlx_can_t_trace(function: Any, part: str) -> None:
    text = _refused(function)
    assert part in text
    assert "mx.export_function" in text


def test_random_outputs_without_a_key() -> None:
    count = itertools.count(1)
    assert "other outputs in each run" in _refused(lambda p, x: x * float(next(count)))
    assert "mx.random.key" in _refused(lambda p, x: x + mx.random.normal(x.shape))


def test_other_outputs_than_mlx_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge: an operation that is read wrongly makes no model."""
    from sqrtdk.frontends.mlx import walk

    monkeypatch.setitem(walk.MLX_OPERATIONS, "Tanh", lambda numbers, node, x: torch.tanh(x) * 1.001)
    assert "gives other outputs than MLX" in _refused(lambda p, x: mx.tanh(x @ p["q"]))
    monkeypatch.undo()
    from_mlx(lambda p, x: mx.tanh(x @ p["q"]), _weights(), _x())


def test_no_function() -> None:
    assert "ndarray" in _refused(np.ones(3), kind=InvalidTypeError)
    assert "dict" in _refused({}, kind=InvalidTypeError)
    assert "a Linear came" in _refused(nn.Linear, kind=InvalidTypeError)


def test_an_input_that_is_given_twice() -> None:
    with pytest.raises(InvalidValueError, match="twice"):
        from_mlx(lambda p, x: x, {}, _x(), x=_x())


def test_an_old_version(monkeypatch: pytest.MonkeyPatch) -> None:
    from sqrtdk.frontends.mlx import arrays

    monkeypatch.setattr(mx, "__version__", "0.20.1")
    arrays.mlx.cache_clear()
    try:
        with pytest.raises(MissingExtraError, match=r"0\.20\.1.*0\.\d+"):
            arrays.mlx()
    finally:
        monkeypatch.undo()
        arrays.mlx.cache_clear()


def test_nothing_of_the_users_is_changed() -> None:
    """Functions, operators, classes, the module, the random state and compilation are as before, after errors too."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 16)

        def __call__(self, x: Any, mistake: bool = False) -> Any:
            y = x + 0
            y += self.inner(x)
            return y.item() if mistake else nn.silu(y)

    def state() -> Any:
        return (
            mx.matmul, vars(array)["__add__"], vars(array)["__setitem__"], mx.fast.rope, mx.vmap, vars(Net)["__call__"],
            vars(nn.Linear)["__call__"], net.inner.weight, net.inner.bias, mx.random.state[0].tolist(),
        )  # fmt: skip

    net = Net()
    compiled = []
    run = mx.compile(lambda x: (compiled.append(1), x + 1)[1])
    before = state()
    from_mlx(net, None, _x())
    with pytest.raises(ModelError):
        from_mlx(net, None, _x(), mistake=True)
    after = state()
    assert all(a is b or a == b for a, b in zip(before[:7], after[:7], strict=True))
    assert before[7] is after[7]
    assert before[8] is after[8]
    assert before[9] == after[9]
    mx.eval(run(_x()), run(_x()))
    assert len(compiled) == 1


FACTORY = """
import mlx.core as mx

def attention(p, x):
    q, k, v = (x @ p[n] for n in "qkv")
    w = mx.softmax(q @ k.swapaxes(1, 2) SCALE, -1)
    return w @ v

def make():
    keys = mx.random.split(mx.random.key(0), 4)
    weights = {n: mx.random.normal((16, 16), key=key) / 4 for n, key in zip("qkv", keys)}
    return attention, weights, (mx.random.normal((2, 6, 16), key=keys[3]),)

def text():
    return attention, {}, "ids"

def numpy():
    f, weights, (x,) = make()
    import numpy
    return f, {n: numpy.array(w) for n, w in weights.items()}, (numpy.array(x),)

def both():
    import jax.numpy
    f, weights, _ = make()
    return f, weights, (jax.numpy.ones((2, 6, 16)),)

def neither():
    import numpy
    return max, {}, (numpy.ones(3),)
"""


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mlxnet.py").write_text(FACTORY.replace("SCALE", ""))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mlxnet", raising=False)
    return tmp_path


@pytest.mark.full
def test_the_command_line_takes_a_factory(factory: Path) -> None:
    done = called("check", "mlxnet:make", "--laws", "none", cwd=factory)
    assert done.returncode == 1, done.stderr
    assert "missing" in done.stdout
    assert "softmax(q.k)" in done.stdout


def test_numbers_of_numpy_are_of_the_framework_that_the_function_s_file_uses(factory: Path) -> None:
    (call,) = sqrtdk.check("mlxnet:numpy", laws="none").calls
    assert call.call.formula == "softmax(q.k)"


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("text", "the inputs are a str"),
        ("neither", "of JAX or of MLX"),
        pytest.param("both", "both JAX and MLX", marks=pytest.mark.full),
    ],
)
def test_a_factory_that_is_no_trio_of_one_framework(factory: Path, name: str, part: str) -> None:
    if name == "both":
        assert optional("jax").numpy
    with pytest.raises(ModelError, match=part):
        sqrtdk.check(f"mlxnet:{name}", laws="none")


@pytest.mark.full
def test_diff_and_record_take_it_as_well(factory: Path) -> None:
    (factory / "mlxright.py").write_text(FACTORY.replace("SCALE", "/ 4"))
    report = sqrtdk.diff("mlxright:make", "mlxnet:make")
    assert {cause.name for pair in report.pairs for cause in pair.causes} == {"scale"}
    function, parameters, inputs = __import__("mlxright").make()
    module = from_mlx(function, parameters, *inputs)
    sqrtdk.record(module, (torch.tensor(inputs[0].tolist()),), "a.safetensors")
    assert (factory / "a.safetensors").is_file()


@pytest.mark.full
def test_nothing_is_imported_before_it_is_asked_for() -> None:
    """`import sqrtdk.frontends` works without MLX, and the error names the extra."""
    import subprocess

    script = (
        "import sys; sys.modules['mlx'] = None; sys.modules['mlx.core'] = None\n"
        "import sqrtdk.frontends\n"
        "try: sqrtdk.frontends.from_mlx(lambda p: p, {})\n"
        "except ImportError as error: print(error.hint)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "sqrtdk[mlx]" in done.stdout, done.stderr

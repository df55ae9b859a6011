"""What is no model here: one error that says the rule, what came, and the fix; and nothing is half run."""

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
from sqrtdk.frontends import from_jax
from tests.frontends.programs import jax, jnp, simple, tokens, weights
from tests.support.program import called


def _refused(function: Any, *inputs: Any, parameters: Any = None, kind: type[SqrtdkError] = ModelError) -> str:
    """The error's message and hint; both are there."""
    with pytest.raises(kind) as caught:
        from_jax(function, weights() if parameters is None else parameters, *(inputs or (tokens(),)))
    assert caught.value.hint
    return f"{caught.value.message} {caught.value.hint}"


def test_every_unread_primitive_is_named_with_its_line() -> None:
    def fn(p: Any, x: Any) -> Any:
        y = jnp.linalg.svd(x)[1]
        return jax.pure_callback(lambda v: v, jax.ShapeDtypeStruct(y.shape, y.dtype), y)

    text = _refused(fn)
    assert "svd" in text
    assert "pure_callback" in text
    assert text.count("test_jax_refused.py:") == 2


@pytest.mark.full
def test_a_kernel_of_pallas_is_not_read() -> None:
    from jax.experimental import pallas

    def double(source: Any, target: Any) -> None:
        target[...] = source[...] * 2

    def fn(p: Any, x: Any) -> Any:
        return pallas.pallas_call(double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)

    assert "pallas_call" in _refused(fn)


@pytest.mark.parametrize(
    ("function", "part"),
    [
        (lambda p, x: x if x.sum() > 0 else -x, "TracerBool"),
        (lambda p, x: x @ p["missing"], "KeyError"),
        (lambda p: p, "takes 1 positional"),
    ],
)
def test_a_function_that_jax_can_t_trace(function: Any, part: str) -> None:
    text = _refused(function)
    assert part in text
    assert "jax.jit" in text
    assert "front.py" not in text


def test_the_line_that_jax_can_t_trace_is_named() -> None:
    """The innermost of the user's; where the call itself is wrong there is none."""

    def inner(x: Any) -> Any:
        return x if x.sum() > 0 else -x  # here

    text = _refused(lambda p, x: inner(x @ p["wq"]))
    line = next(
        at
        for at, line in enumerate(Path(__file__).read_text(encoding="utf-8").splitlines(), 1)
        if line.endswith("# here")
    )
    assert text.startswith(f"JAX can't trace <lambda> ({__file__}:{line}): TracerBoolConversionError")


def test_random_outputs_without_a_key() -> None:
    count = itertools.count(1)
    assert "other outputs in each run" in _refused(lambda p, x: x * float(next(count)))


def test_other_outputs_than_jax_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge: an operation that is read wrongly makes no model."""
    from sqrtdk.frontends.jax import walk

    monkeypatch.setitem(walk.JAX_OPERATIONS, "tanh", lambda numbers, x, **_: torch.tanh(x) * 1.001)
    assert "gives other outputs than JAX" in _refused(lambda p, x: jnp.tanh(x @ p["wq"]))
    monkeypatch.undo()
    from_jax(lambda p, x: jnp.tanh(x @ p["wq"]), weights(), tokens())


def test_no_function() -> None:
    assert "ndarray" in _refused(np.ones(3), kind=InvalidTypeError)
    assert "dict" in _refused({}, kind=InvalidTypeError)


def test_an_input_that_is_given_twice() -> None:
    with pytest.raises(InvalidValueError, match="twice"):
        from_jax(lambda p, x: x, {}, tokens(), x=tokens())


def test_an_old_version(monkeypatch: pytest.MonkeyPatch) -> None:
    from sqrtdk.frontends.jax import arrays

    monkeypatch.setattr(jax, "__version__", "0.4.30")
    arrays.jax.cache_clear()
    try:
        with pytest.raises(MissingExtraError, match=r"0\.4\.30.*0\.8"):
            arrays.jax()
    finally:
        monkeypatch.undo()
        arrays.jax.cache_clear()


FACTORY = """
import jax, jax.numpy as jnp

def attention(p, x):
    q, k, v = (x @ p[n] for n in "qkv")
    w = jax.nn.softmax(q @ k.swapaxes(1, 2) SCALE, -1)
    return w @ v

def make():
    keys = jax.random.split(jax.random.key(0), 4)
    weights = {n: jax.random.normal(key, (16, 16)) / 4 for n, key in zip("qkv", keys)}
    return attention, weights, (jax.random.normal(keys[3], (2, 6, 16)),)

def text():
    return attention, {}, "ids"
"""


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "jaxnet.py").write_text(FACTORY.replace("SCALE", ""))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "jaxnet", raising=False)
    return tmp_path


def test_the_command_line_takes_a_factory(factory: Path) -> None:
    done = called("check", "jaxnet:make", "--laws", "none", cwd=factory)
    assert done.returncode == 1, done.stderr
    assert "missing" in done.stdout
    assert "softmax(q.k)" in done.stdout


def test_a_factory_whose_inputs_are_text(factory: Path) -> None:
    done = called("check", "jaxnet:text", cwd=factory)
    assert done.returncode == 2
    assert "the inputs are a str" in done.stderr


@pytest.mark.full
def test_diff_and_record_take_it_as_well(factory: Path) -> None:
    right = FACTORY.replace("SCALE", "/ 4")
    (factory / "jaxright.py").write_text(right)
    report = sqrtdk.diff("jaxright:make", "jaxnet:make")
    assert {cause.name for pair in report.pairs for cause in pair.causes} == {"scale"}
    module = simple(lambda q, k, v, p: jax.nn.dot_product_attention(q, k, v))()
    sqrtdk.record(from_jax(module[0], module[1], *module[2]), (torch.tensor(tokens().tolist()),), "a.safetensors")
    assert (factory / "a.safetensors").is_file()


@pytest.mark.full
def test_nothing_is_imported_before_it_is_asked_for() -> None:
    """`import sqrtdk.frontends` works without JAX, and the error names the extra."""
    import subprocess

    script = (
        "import sys; sys.modules['jax'] = None\n"
        "import sqrtdk.frontends\n"
        "try: sqrtdk.frontends.from_jax(lambda p: p, {})\n"
        "except ImportError as error: print(error.hint)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "sqrtdk[jax]" in done.stdout, done.stderr


@pytest.mark.full
@pytest.mark.parametrize("returned", ["net", "(net, (x,))", "[net, p]"])
def test_parameters_or_inputs_that_are_missing_are_asked_for(returned: str, factory: Path) -> None:
    """`return model`, as with torch: (model, None, inputs) is asked for."""
    lines = (
        "from flax import nnx",
        "import jax.numpy as jnp",
        "net, x, p = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), jnp.ones(4), {}",
    )
    (factory / "jaxbare.py").write_text("\n".join((*lines, f"def make(): return {returned}")))
    done = called("check", "jaxbare:make", cwd=factory)
    assert done.returncode == 2
    assert "(module, None, inputs)" in done.stderr

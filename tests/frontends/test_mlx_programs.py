"""MLX functions in the forms that users write: sites, lines, other shapes and dtypes, caches, keys."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch

import sqrtdk
from sqrtdk.frontends import from_mlx
from tests.frontends.mlx_models import FAMILIES, ids, original, port
from tests.support.optional import optional
from tests.support.paths import ROOT

mx, nn = optional("mlx.core"), optional("mlx.nn")

B, T, D, H, E = 2, 10, 32, 4, 8
FILE = "tests/frontends/test_mlx_programs.py"


def normal(*shape: int, salt: int = 0) -> Any:
    return mx.array(np.random.default_rng(salt + sum(shape)).standard_normal(shape).astype(np.float32))


def weights(salt: int = 0) -> dict[str, Any]:
    return {name: normal(D, D, salt=salt + n) / 5 for n, name in enumerate("qkvo")}


def tokens() -> Any:
    return normal(B, T, D, salt=9)


def attention(p: Any, x: Any) -> Any:
    q, k, v = ((x @ p[name]).reshape(*x.shape[:2], H, E).swapaxes(1, 2) for name in "qkv")
    mask = mx.tril(mx.ones((x.shape[1], x.shape[1]), mx.bool_))
    s = mx.where(mask, q @ k.swapaxes(2, 3) / E**0.5, -1e30)
    return (mx.softmax(s, -1) @ v).swapaxes(1, 2).reshape(x.shape) @ p["o"]


def layers(p: Any, x: Any) -> Any:
    for layer in p["layers"]:
        h = x * mx.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)
        x += attention(layer, h)
    return x


def test_each_layer_of_a_loop_is_a_site_with_its_lines() -> None:
    """Parameters keep their paths; what is written in place belongs to the layer that writes it."""
    parameters = {"layers": [weights(7 * n) for n in range(3)]}
    module = from_mlx(layers, parameters, tokens())
    assert [name for name, _ in module.named_parameters(remove_duplicate=True)][:1] == ["layers.0.q"]
    calls = sqrtdk.check(module, (torch.tensor(tokens().tolist()),), laws="none").calls
    assert [call.call.site for call in calls] == [f"layers.{n}.attention" for n in range(3)]
    assert {call.call.formula for call in calls} == {"softmax(0.3536 * q.k + causal)"}
    for judged in calls:
        file, _, line = str(judged.call.softmax_at).rpartition(":")
        assert file == FILE
        assert "mx.softmax" in (ROOT / file).read_text(encoding="utf-8").splitlines()[int(line) - 1]


def test_other_shapes_are_traced_anew() -> None:
    other = tokens()[:1, :5]
    module = from_mlx(attention, weights(), tokens())
    assert torch.equal(module(other), from_mlx(attention, weights(), other)(other))


@pytest.mark.full
def test_a_parameter_in_bfloat16_makes_the_program_of_bfloat16() -> None:
    half = from_mlx(attention, weights(), tokens()).to(torch.bfloat16)
    cast = {name: value.astype(mx.bfloat16) for name, value in weights().items()}
    same = from_mlx(attention, cast, tokens().astype(mx.bfloat16))
    x = torch.tensor(tokens().tolist()).bfloat16()
    assert torch.equal(half(x), same(x))


@pytest.mark.full
def test_float64_is_the_program_without_rounding() -> None:
    cast = {name: value.astype(mx.bfloat16) for name, value in weights().items()}
    x = tokens().astype(mx.bfloat16)
    half = from_mlx(attention, cast, x)
    own, exact = half(x), half.double()(torch.tensor(x.astype(mx.float32).tolist()).double())
    wide = {name: value.astype(mx.float32) for name, value in cast.items()}
    plain = from_mlx(attention, wide, x.astype(mx.float32)).double()(
        torch.tensor(x.astype(mx.float32).tolist()).double()
    )
    assert exact.dtype is torch.float64
    # numbers stay those of the program: 8**0.5 is 2.828125 in bfloat16, off by 1.1e-4
    assert float((exact - plain).abs().max()) < 1e-3 * float(plain.abs().max())
    assert 0 < float((own.double() - exact).abs().max()) < 0.1


@pytest.mark.full
def test_a_key_is_an_input() -> None:
    def fn(p: Any, x: Any, key: Any) -> Any:
        return attention(p, x) * mx.random.bernoulli(0.9, x.shape, key=key) / 0.9

    module = from_mlx(fn, weights(), tokens(), mx.random.key(3))
    assert list(inspect.signature(module.forward).parameters) == ["x", "key"]
    assert torch.equal(module(tokens(), mx.random.key(3)), module(tokens(), key=torch.tensor([0, 3])))
    assert not torch.equal(module(tokens(), mx.random.key(3)), module(tokens(), mx.random.key(4)))


@pytest.mark.full
def test_a_cache_of_mlx_lm_is_an_input_and_stays_as_it_is() -> None:
    cache = optional("mlx_lm.models.cache")
    model = port(FAMILIES["llama"], original(FAMILIES["llama"]))
    array = mx.array(ids().numpy().astype("int32"))
    filled = cache.make_prompt_cache(model)
    model(array[:, :8], filled)
    mx.eval([part.state for part in filled])
    before = [(part.keys, part.offset) for part in filled]
    module = from_mlx(model, None, array[:, 8:9], filled)
    assert all(part.keys is keys and part.offset == offset for part, (keys, offset) in zip(filled, before, strict=True))
    own, right = module(array[:, 8:9], filled), torch.tensor(model(array[:, :9])[:, -1:].tolist())
    assert float((own - right).abs().max()) < 1e-5 * float(right.abs().max())
    empty = cache.make_prompt_cache(model)
    from_mlx(model, None, array, empty)
    assert all(part.keys is None for part in empty)
    report = sqrtdk.check(module, (torch.tensor(array[:, 8:9].tolist()), filled), laws="none")
    assert [call.call.formula for call in report.calls] == ["softmax(0.25 * rope(q).rope(k))"] * 2


@pytest.mark.full
def test_a_function_in_other_forms() -> None:
    """Compiled, partial, a method; a module as parameters; weights of numpy and torch; settings beside arrays."""
    import functools

    right = from_mlx(attention, weights(), tokens())(tokens())
    as_numpy = {name: np.asarray(value) for name, value in weights().items()}
    as_torch = {name: torch.tensor(value) for name, value in as_numpy.items()}
    for form in (mx.compile(attention), functools.partial(attention)):
        assert torch.equal(from_mlx(form, weights(), tokens())(tokens()), right)
    for other in (as_numpy, as_torch):
        assert torch.equal(from_mlx(attention, other, np.asarray(tokens()))(tokens()), right)
    settings = from_mlx(lambda p, x, sign, mask: attention(p["w"], x) * p["by"] * sign, {"w": weights(), "by": 2},
                        tokens(), 3, None)  # fmt: skip
    assert torch.equal(settings(tokens(), 3, None), right * 2 * 3)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(D, D)

        def encode(self, x: Any) -> Any:
            return mx.vmap(lambda row: self.inner(row))(x)

    net = Net()
    methods = from_mlx(net.encode, None, tokens()), from_mlx(lambda model, x: model.inner(x), net, tokens())
    plain = torch.nn.functional.linear(
        torch.tensor(tokens().tolist()), *(torch.tensor(net.inner[name].tolist()) for name in ("weight", "bias"))
    )
    for module in methods:
        assert [name for name, _ in module.named_parameters()] == ["inner.weight", "inner.bias"]
        assert torch.allclose(module(tokens()), plain, atol=1e-5)

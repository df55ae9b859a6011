"""Subclasses of Tensor as arguments: torch's causal bias is a mask; any other is read right, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.masked import masked_tensor
from torch.nn import functional
from torch.nn.attention.bias import CausalBias, causal_lower_right, causal_upper_left
from torch.utils._pytree import tree_map

import sqrtdk
from sqrtdk import positions, scores, stats
from sqrtdk.errors import InvalidTypeError, SqrtdkError, UnsupportedError
from tests.attention.calls import close, close_gradients, every, qkv, with_aux
from tests.attention.oracle import attend

SIDES: dict[str, Callable[..., CausalBias]] = {"upper left": causal_upper_left, "lower right": causal_lower_right}
SIZES = [(7, 7), (7, 9), (9, 7), (1, 9)]
over_sides = pytest.mark.parametrize("side", SIDES)
pytestmark = [
    pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of (nested|Masked).* is in prototype stage:UserWarning"),
]


def triangle(side: str, length: int, keys: int) -> Tensor:
    return torch.ones(length, keys, dtype=torch.bool).tril(keys - length if side == "lower right" else 0)


def bias_of(side: str, length: int, keys: int) -> CausalBias:
    """A causal bias in memory that holds other numbers before."""
    sevens = [torch.full((variants, length, keys), 7.0) for variants in (1, 2) for _ in range(8)]
    del sevens
    return SIDES[side](length, keys)


# torch's causal bias


@every
@over_sides
@pytest.mark.parametrize(("length", "keys"), SIZES)
def test_a_causal_bias_is_its_triangle(impl: str, side: str, length: int, keys: int) -> None:
    q, k, v = qkv(length, keys)
    answer = attend(q, k, v, scale=8**-0.5, attn_mask=triangle(side, length, keys))
    found = sqrtdk.attention(q, k, v, bias_of(side, length, keys), impl=impl)
    assert type(found) is Tensor
    close(found, answer.output, logit=answer.size)
    _, aux = with_aux(q, k, v, bias_of(side, length, keys), impl=impl)
    assert torch.equal(aux.keys, triangle(side, length, keys).sum(-1).expand_as(aux.keys))


@every
@over_sides
def test_gradients_under_a_causal_bias(impl: str, side: str) -> None:
    given = qkv()
    answer = attend(*given, scale=8**-0.5, attn_mask=triangle(side, 7, 9))
    found = sqrtdk.attention(*given, bias_of(side, 7, 9), impl=impl)
    cotangent = torch.randn_like(found)
    wanted = torch.autograd.grad((answer.output * cotangent).sum(), given)
    close_gradients(torch.autograd.grad((found * cotangent).sum(), given), wanted)


@every
@over_sides
def test_a_causal_bias_beside_what_else_there_is(impl: str, side: str) -> None:
    """Grouped heads, a batch of two dimensions, a window, a position term, and the package's own lower right."""
    q, k = torch.randn(2, 1, 4, 7, 8), torch.randn(2, 3, 2, 9, 8)
    mask, seen = bias_of(side, 7, 9), triangle(side, 7, 9)
    for more in ({}, {"window": (3, 1)}, {"bias": positions.alibi(4)}, {"causal_lower_right": True}):
        options: dict[str, Any] = {"enable_gqa": True, "impl": impl, **more}
        close(sqrtdk.attention(q, k, k, mask, **options), sqrtdk.attention(q, k, k, seen, **options).double())
        options.pop("impl")
        measured, wanted = (sqrtdk.measure(q, k, attn_mask=m, **options) for m in (mask, seen))
        assert torch.equal(measured.keys, wanted.keys)
        assert sqrtdk.explain(q, k, k, mask, **options).impl


@over_sides
def test_a_large_causal_bias_runs_in_the_compiled_kernel_as_well(side: str) -> None:
    q, k = torch.randn(1, 4, 512, 32), torch.randn(1, 4, 512, 32)
    close(
        sqrtdk.attention(q, k, k, bias_of(side, 512, 512)),
        functional.scaled_dot_product_attention(q, k, k, is_causal=True),
    )


@over_sides
def test_modules_and_statistics_take_a_causal_bias(side: str) -> None:
    x, seen = torch.randn(2, 7, 8), triangle(side, 7, 7)
    module = sqrtdk.nn.MultiHeadAttention(8, 2, batch_first=True)
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[:, 5:] = True
    for key_padding_mask in (None, padding):
        found, wanted = (module(x, x, x, key_padding_mask, attn_mask=mask)[0] for mask in (bias_of(side, 7, 7), ~seen))
        assert torch.equal(found, wanted)
    q, k = torch.randn(2, 7, 8), torch.randn(2, 9, 8)
    for single in (sqrtdk.nn.ScaledDotProductAttention(8), sqrtdk.nn.AdditiveAttention(8, 8, 4)):
        for need_weights in (False, True):
            found, wanted = (
                single(q, k, k, mask, need_weights=need_weights)
                for mask in (bias_of(side, 7, 9), ~triangle(side, 7, 9))
            )
            torch.testing.assert_close(found, wanted)
    logits, visible = torch.randn(2, 3, 7, 9), triangle(side, 7, 9)
    for function in (
        lambda mask: stats.row_stats(logits, mask).keys,
        lambda mask: stats.attention_row_stats(q[:, None], k[:, None], scale=1.0, visible=mask).rows.keys,
    ):
        assert torch.equal(function(bias_of(side, 7, 9)), function(visible))


def test_a_causal_bias_that_does_not_fit_is_refused() -> None:
    q, k, v = qkv()
    with pytest.raises(ValueError, match=r"a causal bias of 7 rows and 7 keys; got 7 and 9") as caught:
        sqrtdk.attention(q, k, v, causal_lower_right(7, 7))
    assert isinstance(caught.value, SqrtdkError)
    with pytest.raises(ValueError, match="a causal bias or is_causal is True; got both"):
        sqrtdk.attention(q, k, v, causal_lower_right(7, 9), is_causal=True)
    for name in ("query", "bias", "sinks", "scale"):
        with pytest.raises(InvalidTypeError, match=f"{name} is numbers; got a CausalBias"):
            sqrtdk.attention(**({"query": q, "key": k, "value": v} | {name: causal_upper_left(7, 9)}))


@pytest.mark.full
@over_sides
def test_a_causal_bias_is_compiled_without_a_graph_break(side: str) -> None:
    torch.compiler.reset()
    q, k, v = qkv()
    run = torch.compile(lambda q, k, v, mask: sqrtdk.attention(q, k, v, mask), fullgraph=True, backend="aot_eager")
    close(run(q, k, v, bias_of(side, 7, 9)), sqrtdk.attention(q, k, v, triangle(side, 7, 9)))


# other classes


class Named(Tensor):
    """Nothing of its own."""


class Observed(Tensor):
    """Looks on: what every operation makes of the numbers is right."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Wrapper(Tensor):
    """Holds a tensor, and runs each operation on that."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Wrapper:
        made = Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, strides=held.stride())
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda x: x.held if isinstance(x, Wrapper) else x, (args, kwargs or {}))
        return func(*args, **kwargs)


class Empty(Tensor):
    """A shape without numbers, which no operation takes."""

    @staticmethod
    def __new__(cls, like: Tensor) -> Empty:
        return Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"Empty has no {func}")


class Banded(Tensor):
    """A mask that torch's function asks for its band, whatever its memory holds."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            q, k, v, mask = args
            return func(q, k, v, torch.ones(mask.shape[-2:], dtype=torch.bool).tril().triu(-1))
        return super().__torch_function__(func, types, args, kwargs or {})


class Coded(Tensor):
    """Values that torch's function decodes."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            args = tuple(x.as_subclass(Tensor) * 3 if isinstance(x, Coded) else x for x in args)
        return super().__torch_function__(func, types, args, kwargs or {})


RIGHT: dict[str, Callable[[Tensor], Tensor]] = {
    "named": lambda x: x.as_subclass(Named),
    "observed": lambda x: x.as_subclass(Observed),
    "wrapper": Wrapper,
    "parameter": lambda x: nn.Parameter(x, requires_grad=False),
    "named parameter": lambda x: type("Weight", (nn.Parameter,), {})(x, requires_grad=False),
}
REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "nested": (lambda x: torch.nested.nested_tensor(list(x)), "got a nested one"),
    "jagged": (lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged), "got a nested one"),
    "masked": (lambda x: masked_tensor(x, torch.ones_like(x, dtype=torch.bool)), "got a MaskedTensor"),
    "empty": (Empty, "is a Empty, with operations of its own"),
    "lazy": (lambda x: nn.UninitializedParameter(), "got UninitializedParameter without values"),
}


def arguments() -> dict[str, Tensor]:
    q, k, v = (t.detach() for t in qkv())
    return {
        "query": q,
        "key": k,
        "value": v,
        "attn_mask": torch.rand(7, 9) > 0.3,
        "scale": torch.rand(2, 7, 1) + 0.5,
        "bias": torch.randn(7, 9),
        "sinks": torch.randn(2, 7, 1),
    }


@every
@pytest.mark.parametrize("kind", RIGHT)
def test_a_class_whose_numbers_are_as_stored_gives_what_a_tensor_gives(impl: str, kind: str) -> None:
    given = arguments()
    if impl in ("fused", "cpu"):
        given.pop("sinks")
    wanted = sqrtdk.attention(**given, impl=impl)
    for name in given:
        found = sqrtdk.attention(**(given | {name: RIGHT[kind](given[name])}), impl=impl)
        close(found.as_subclass(Tensor), wanted.double())


@pytest.mark.parametrize("kind", REFUSED)
def test_any_other_class_is_refused_by_name_whichever_argument_it_is(kind: str) -> None:
    make, words = REFUSED[kind]
    given = arguments()
    for name in given:
        with pytest.raises(SqrtdkError, match=rf"{name} .*{words}"):
            sqrtdk.attention(**(given | {name: make(given[name])}))
    for name in ("query", "key", "attn_mask", "bias", "scale"):
        rest = {key: x for key, x in given.items() if key not in ("value", "sinks")}
        with pytest.raises(SqrtdkError, match=rf"{name} .*{words}"):
            sqrtdk.measure(**(rest | {name: make(given[name])}))


def test_a_class_that_torch_s_function_asks_for_its_meaning_is_refused() -> None:
    given = {name: x for name, x in arguments().items() if name in ("query", "key", "value")}
    with pytest.raises(InvalidTypeError, match="attn_mask is a Banded, of which torch's"):
        sqrtdk.attention(**given, attn_mask=torch.zeros(7, 9).as_subclass(Banded))
    with pytest.raises(InvalidTypeError, match="bias is a Banded"):
        sqrtdk.attention(**given, bias=torch.zeros(7, 9).as_subclass(Banded))
    for name in given:
        with pytest.raises(InvalidTypeError, match=f"{name} is a Coded"):
            sqrtdk.attention(**(given | {name: given[name].as_subclass(Coded)}))


def test_looking_at_a_class_is_no_attention_of_the_model() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return sqrtdk.attention(x, x, x).as_subclass(Tensor)

    x = torch.randn(1, 2, 7, 8)
    model, counts = Model(), []
    for given in (x, x.as_subclass(Observed)):
        with sqrtdk.trace(model) as record:
            model(given)
        counts.append(len(record.calls))
    assert counts == [1, 1]


@pytest.mark.parametrize("make", [lambda x: torch.nested.nested_tensor(list(x)), Empty])
def test_parts_of_a_score_or_a_bias_are_looked_at_as_well(make: Callable[[Tensor], Tensor]) -> None:
    q = torch.randn(2, 3, 7, 8)
    weights = torch.randn(2, 8, 8)
    with pytest.raises(SqrtdkError, match=r"nested|Empty"):
        sqrtdk.attention(q[:, :2], q[:, :2], q[:, :2], score=scores.bilinear(make(weights)))
    with pytest.raises(SqrtdkError, match=r"nested|Empty"):
        stats.row_stats(make(q))


def test_a_module_refuses_them_before_it_projects() -> None:
    x = torch.randn(2, 7, 8)
    module = sqrtdk.nn.MultiHeadAttention(8, 2, batch_first=True)
    masked = masked_tensor(x, torch.ones_like(x, dtype=torch.bool))
    with pytest.raises(InvalidTypeError, match="key is a plain tensor; got a MaskedTensor"):
        module(x, masked, x)
    hidden = masked_tensor(torch.zeros(2, 7), torch.ones(2, 7, dtype=torch.bool))
    for name in ("attn_mask", "key_padding_mask"):
        with pytest.raises(InvalidTypeError, match=f"{name} is a plain tensor; got a MaskedTensor"):
            module(x, x, x, **{name: hidden})


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_a_sharded_tensor_runs_or_is_refused_by_name() -> None:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        given = [t.detach() for t in qkv()]
        sharded = [distribute_tensor(t, mesh, [Shard(1)]) for t in given]
        wanted = sqrtdk.attention(*given, softcap=3.0)
        close(sqrtdk.attention(*sharded, softcap=3.0).full_tensor(), wanted.double())
        with pytest.raises(UnsupportedError, match=r"query is a DTensor, .*mixed torch.Tensor and DTensor"):
            sqrtdk.attention(*sharded, window=(2, 0))
    finally:
        distributed.destroy_process_group()

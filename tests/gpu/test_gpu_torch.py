"""The Triton kernel as an operator of torch: checks, compilers, tensors without data, autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import sqrtdk
from sqrtdk import AuxRequest, positions, scales, scores
from sqrtdk.errors import UnsupportedError
from sqrtdk.stats.request import AuxOutput
from tests.attention.plain import plain
from tests.gpu.judged import attention, derivatives, expected, qkv
from tests.support.triton_here import DEVICE, in_the_interpreter, needs_triton
from tests.tolerances import complaint, gradient_complaints, half_complaint

operators = pytest.importorskip("sqrtdk.impl.gpu.operators", reason="Triton is not installed")
pytestmark = needs_triton
ALL = AuxRequest.all()
EVERYTHING = (1 << len(AuxOutput._fields)) - 1
LENGTH, KEYS = 9, 13


def leaves(dtype: torch.dtype = torch.float32, heads: tuple[int, int] = (4, 2)) -> dict[str, Tensor]:
    """Query, key and value with gradients."""
    made = qkv(LENGTH, KEYS, 8, 8, heads)
    return {name: leaf.to(DEVICE, dtype).requires_grad_() for name, leaf in made.items()}


def rand(*sizes: int) -> Tensor:
    return torch.rand(sizes, device=DEVICE)


GIVEN: dict[str, Callable[[], tuple[Any, ...]]] = {
    "statistics": lambda: (0.25, None, 0.0, None, None, None, None, 0, None, None, EVERYTHING),
    "a table": lambda: (
        *(0.25, None, 0.0, None, rand(1, 4, 1, LENGTH + KEYS - 1).requires_grad_(), None, None, 0, None, None, 0),
    ),
    "no statistics": lambda: (0.25, None, 0.0, None, None, None, None, None, 9, None, 0),
    "everything": lambda: (
        0.25,
        rand(1, 4, LENGTH, 1).requires_grad_(),
        5.0,
        rand(1, 1, LENGTH, KEYS).requires_grad_(),
        None,
        rand(1, 4, 1, KEYS) < 0.7,
        rand(1, 4, 1, 1).requires_grad_(),
        3,
        7,
        None,
        EVERYTHING,
    ),
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param("statistics", torch.float16, marks=pytest.mark.full),
        ("a table", torch.float32),
        ("no statistics", torch.float32),
        pytest.param("everything", torch.bfloat16, marks=pytest.mark.full),
    ],
)
def test_torch_s_own_check_of_operators_passes(name: str, dtype: torch.dtype) -> None:
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    given = (*leaves(dtype).values(), *GIVEN[name]())
    done = torch.library.opcheck(torch.ops.sqrtdk_gpu.forward.default, given, test_utils=tests)
    assert set(done.values()) == {"SUCCESS"}


@pytest.mark.full
def test_places_pass_the_check_too() -> None:
    given = tuple(leaf.detach() for leaf in leaves().values())
    places = torch.arange(LENGTH, device=DEVICE) + 2
    numbers = (0.25, None, 0.0, None, None, None, None, 1, 5, places, 1 << len(AuxOutput._fields))
    done = torch.library.opcheck(torch.ops.sqrtdk_gpu.forward.default, (*given, *numbers))
    assert set(done.values()) == {"SUCCESS"}


# compilers

COSINE = scores.cosine(gain=5.0)
OPTIONS: dict[str, Callable[[dict[str, Tensor]], dict[str, Any]]] = {
    "plain": lambda t: {},
    "causal": lambda t: {"is_causal": True},
    "softcap, sinks, window": lambda t: {"softcap": 4.0, "sinks": 0.0, "window": (5, None)},
    "alibi": lambda t: {"bias": positions.alibi(4), "causal_lower_right": True},
    "a scale that is learned": lambda t: {"scale": t["scale"]},
    "a bias that is learned": lambda t: {"bias": t["bias"]},
    "mask": lambda t: {"attn_mask": torch.arange(KEYS, device=DEVICE) % 3 > 0},
    "cosine": lambda t: {"score": COSINE},
    "log n": lambda t: {"scale": scales.log_n(), "is_causal": True},
}
MORE = {"a scale that is learned": {"scale": (4, 1, 1)}, "a bias that is learned": {"bias": (LENGTH, KEYS)}}


def inputs(name: str) -> dict[str, Tensor]:
    return leaves() | {leaf: rand(*sizes).requires_grad_() for leaf, sizes in MORE.get(name, {}).items()}


def run(name: str, given: dict[str, Tensor], impl: str = "triton") -> tuple[Tensor, AuxOutput]:
    options = OPTIONS[name](given)
    request = AuxRequest(lse=True, entropy_nats=True, max_logit=True, keys=True)
    q, k, v = given["query"], given["key"], given["value"]
    output, aux = sqrtdk.attention(q, k, v, enable_gqa=True, impl=impl, return_aux=request, **options)
    return output, aux


def same(found: tuple[Tensor, AuxOutput], wanted: tuple[Tensor, AuxOutput], given: dict[str, Tensor]) -> None:
    for mine, theirs in zip((found[0], *found[1]), (wanted[0], *wanted[1]), strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            text = complaint(mine.detach().cpu(), theirs.detach().cpu(), torch.float32, length=KEYS, logit=10.0)
            assert text is None, text
    gradients = [
        derivatives({"output": output, "lse": aux.lse, "entropy_nats": aux.entropy_nats}, given)
        for output, aux in (found, wanted)
    ]
    assert not gradient_complaints(*gradients, torch.float32, length=KEYS, logit=10.0, rows=4 * LENGTH)


@pytest.mark.full
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", OPTIONS)
def test_compiled_without_a_break_it_gives_the_same(name: str, backend: str) -> None:
    torch.compiler.reset()
    given = inputs(name)
    compiled = torch.compile(lambda given: run(name, given), fullgraph=True, backend=backend)
    same(compiled(given), run(name, given), given)


@pytest.mark.full
def test_compiled_for_any_length_it_is_not_compiled_for_each() -> None:
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda q, k: sqrtdk.attention(q, k, k, is_causal=True, impl="triton"), dynamic=True,
                             fullgraph=True, backend=counter)  # fmt: skip
    counts = []
    for length in (6, 17, 40, 61):
        q, k = (torch.randn(1, 2, n, 8, device=DEVICE) for n in (length, length + 5))
        wanted = sqrtdk.attention(q.double(), k.double(), k.double(), is_causal=True, impl="dense").cpu()
        assert complaint(compiled(q, k).cpu(), wanted, torch.float32, length=length, logit=10.0) is None
        counts.append(counter.frame_count)
    assert counts[1] == counts[-1]


class Net(nn.Module):
    """A call of the kernel."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention and the entropy of its rows."""
        output, aux = sqrtdk.attention(q, k, v, enable_gqa=True, is_causal=True, impl="triton", return_aux=ALL)
        return torch.cat([output, aux.entropy_nats.unsqueeze(-1)], -1)


@pytest.mark.full
def test_exported_with_a_dynamic_length_it_gives_the_same() -> None:
    length = torch.export.Dim("length", min=2, max=4096)
    sizes = {"q": {2: length}, "k": {2: length}, "v": {2: length}}

    def given(length: int) -> tuple[Tensor, ...]:
        return tuple(torch.randn(1, heads, length, 8, device=DEVICE) for heads in (4, 2, 2))

    program = torch.export.export(Net(), given(64), dynamic_shapes=sizes)
    assert "sqrtdk_gpu.forward" in str(program.graph)
    longer = given(90)
    text = complaint(program.module()(*longer).cpu(), Net()(*longer).cpu(), torch.float32, length=90, logit=10.0)
    assert text is None, text


@in_the_interpreter
def test_the_interpreter_s_kernel_is_one_node_of_the_graph() -> None:
    """On a GPU the launches are in the graph themselves; an interpreted kernel can't be traced."""
    graphs = []

    def keep(graph: torch.fx.GraphModule, given: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    q = torch.randn(1, 2, 9, 8)
    torch.compile(lambda q: sqrtdk.attention(q, q, q, impl="triton"), fullgraph=True, backend=keep)(q)
    assert sum("sqrtdk_gpu.forward" in str(node.target) for graph in graphs for node in graph.graph.nodes) == 1


# tensors without data, transforms


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", OPTIONS)
def test_fake_tensors_have_the_shapes_of_real_ones(name: str) -> None:
    real = run(name, inputs(name))
    with FakeTensorMode():
        fake = run(name, inputs(name))
        total = fake[0].float().sum() + fake[1].entropy_nats.sum()
        assert total.shape == ()
    for mine, theirs in zip((fake[0], *fake[1]), (real[0], *real[1]), strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or (mine.shape, mine.dtype, mine.stride()) == (theirs.shape, theirs.dtype, theirs.stride())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_operators_themselves_take_tensors_of_no_data(dtype: torch.dtype) -> None:
    q, k, v = (leaf.detach().to("meta") for leaf in leaves(dtype).values())
    numbers = (0.25, None, 0.0, None, None, None, None, 0, None, None)
    for statistics in (0, EVERYTHING, 1 << len(AuxOutput._fields)):
        found = operators.forward(q, k, v, *numbers, statistics)
        assert [t.dtype for t in found] == [dtype, *[torch.float32] * 4]
        assert found[0].shape == (1, 4, LENGTH, 8)
        assert found[1].shape == (1, 4, LENGTH)
        assert found[3].shape[0] == {0: 0, EVERYTHING: 8}.get(statistics, 9)
        assert found[4].shape == (2, 1, 4, LENGTH)


def test_transforms_of_torch_func_are_left_to_others() -> None:
    q = torch.randn(3, 1, 2, 5, 8, device=DEVICE)
    with pytest.raises(UnsupportedError, match="a transform of torch"):
        torch.vmap(lambda t: sqrtdk.attention(t, t, t, impl="triton"))(q)
    with pytest.raises(UnsupportedError, match="a transform of torch"):
        torch.func.grad(lambda t: sqrtdk.attention(t, t, t, impl="triton").sum())(q)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_forward_mode_differentiation_is_left_to_others() -> None:
    q = torch.randn(1, 2, 5, 8, device=DEVICE)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(UnsupportedError, match="forward-mode"):
            sqrtdk.attention(dual, q, q, impl="triton")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dropout": ({"dropout_p": 0.1}, "it has no dropout"),
    "score": ({"score": scores.keras_additive()}, "the score is no dot product"),
    "content": ({"bias": positions.shaw(8, max_distance=3)}, "a position term that depends on q and k"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_take_is_refused(name: str) -> None:
    options, reason = REFUSED[name]
    q = torch.randn(1, 2, 5, 8, device=DEVICE)
    with pytest.raises(UnsupportedError, match=reason):
        sqrtdk.attention(q, q, q, impl="triton", **options)


@pytest.mark.parametrize(("width", "value_width"), [(257, 8), (8, 257)])
def test_wider_heads_than_256_are_refused(width: int, value_width: int) -> None:
    q, v = (torch.randn(1, 2, 5, n, device=DEVICE) for n in (width, value_width))
    with pytest.raises(UnsupportedError, match="256; got"):
        sqrtdk.attention(q, q, v, impl="triton")


def test_float64_is_refused() -> None:
    q = torch.randn(1, 2, 5, 8, device=DEVICE, dtype=torch.float64)
    with pytest.raises(UnsupportedError, match="it takes float32, bfloat16, float16"):
        sqrtdk.attention(q, q, q, impl="triton")


# autocast


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "is_causal": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_gives_its_dtype(dtype: torch.dtype, options: dict[str, Any]) -> None:
    q, k, v = (torch.randn(1, 2, n, 8, device=DEVICE) for n in (40, 40, 40))
    with torch.autocast(DEVICE.type, dtype):
        found, aux = sqrtdk.attention(q, k, v, impl="triton", return_aux=ALL, **options)
    assert found.dtype == dtype
    assert aux.entropy_nats.dtype == torch.float32
    half = [t.cpu().to(dtype) for t in (q, k, v)]
    exact, statistics = sqrtdk.attention(*(t.double() for t in half), impl="dense", return_aux=ALL, **options)
    beside = [plain(*half, scale=8**-0.5, scale_first=first, **options)[0] for first in (False, True)]
    assert half_complaint(found.cpu(), exact, beside, dtype) is None
    for name in AuxOutput._fields:
        mine, theirs = getattr(aux, name).cpu(), getattr(statistics, name)
        assert complaint(mine, theirs, torch.float32, length=40, logit=20.0, magnitude=1.0) is None, name


# gradients


def test_statistics_but_lse_and_entropy_carry_no_gradient_and_inputs_are_not_changed() -> None:
    given = leaves()
    before = [leaf.detach().clone() for leaf in given.values()]
    _, aux = attention(given, {"softcap": 4.0}, ALL)
    assert all(map(torch.equal, given.values(), before))
    assert {name for name in ALL.wanted if getattr(aux, name).requires_grad} == {"lse", "entropy_nats"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["query", "key", "value", "scale", "bias", "sinks"])
def test_one_leaf_alone_has_the_gradient_that_it_has_beside_others(name: str) -> None:
    made = {n: leaf.detach() for n, leaf in leaves().items()}
    made |= {"scale": rand(4, 1, 1), "bias": rand(4, 1, KEYS), "sinks": rand(4)}
    every = {n: leaf.clone().requires_grad_() for n, leaf in made.items()}
    alone = made | {name: made[name].clone().requires_grad_()}
    wanted, found = (
        torch.autograd.grad(output.square().sum() + aux.entropy_nats.sum() - aux.lse.sum(), given[name])[0]
        for given in (every, alone)
        for output, aux in [attention(given, {}, AuxRequest(lse=True, entropy_nats=True))]
    )
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("of", ["output", "lse", "entropy_nats"])
def test_each_result_alone_has_a_gradient(of: str) -> None:
    given = leaves()
    exact = {name: leaf.detach().cpu().double().requires_grad_() for name, leaf in given.items()}
    answer = expected(exact, {})
    output, aux = attention(given, {}, AuxRequest(lse=True, entropy_nats=True))
    mine = {"output": output, "lse": aux.lse, "entropy_nats": aux.entropy_nats}[of]
    theirs = {"output": answer.output, **answer.statistics}[of]
    found, wanted = derivatives({of: mine}, given), derivatives({of: theirs}, exact)
    if of != "output":
        assert found["value"] is None or not found["value"].any()
        found, wanted = ({k: g for k, g in all_of.items() if k != "value"} for all_of in (found, wanted))
    found = {name: None if g is None else g.cpu() for name, g in found.items()}
    assert not gradient_complaints(found, wanted, torch.float32, length=KEYS, logit=10.0, rows=4 * LENGTH)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "name", ["causal", "softcap, sinks, window", "a scale that is learned", "a bias that is learned"]
)
def test_a_gradient_of_the_gradient_is_that_of_dense(name: str) -> None:
    given = inputs(name)
    exact = {leaf: t.detach().double().requires_grad_() for leaf, t in given.items()}
    found, wanted = (twice(name, of, impl) for of, impl in ((given, "triton"), (exact, "dense")))
    for mine, theirs in zip(found, wanted, strict=True):
        assert not gradient_complaints(mine, theirs, torch.float32, length=KEYS, logit=10.0, rows=4 * LENGTH)


def twice(name: str, given: dict[str, Tensor], impl: str) -> list[dict[str, Tensor | None]]:
    """First derivatives, and those of a function of them."""
    output, aux = run(name, given, impl)
    total = output.square().sum() + aux.lse.square().sum() + aux.entropy_nats.square().sum()
    first = torch.autograd.grad(total, list(given.values()), create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), list(given.values()))
    return [{n: g.detach().cpu() for n, g in zip(given, gradients, strict=True)} for gradients in (first, second)]


@pytest.mark.full
def test_runs_are_bit_equal() -> None:
    given = leaves() | {"bias": rand(LENGTH, KEYS).requires_grad_()}

    def everything() -> list[Tensor]:
        output, aux = attention(given, {"is_causal": True}, ALL)
        return [output, *aux, *torch.autograd.grad(output.sum() + aux.entropy_nats.sum(), list(given.values()))]

    assert all(map(torch.equal, everything(), everything()))

"""The compiled kernel beyond the battery: as an operator of torch, at the edges, under threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import sqrtdk
from sqrtdk import AuxRequest, positions
from sqrtdk.errors import UnsupportedError
from tests.support.kernel_here import needs_kernel
from tests.tolerances import complaint, gradient_complaints, half_complaint

pytestmark = needs_kernel
ALL = AuxRequest.all()


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def qkv(length: int = 40, keys: int = 50, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    sizes = ((1, 4, length, 16), (1, 2, keys, 16), (1, 2, keys, 16))
    return [torch.randn(size).to(dtype).requires_grad_() for size in sizes]


def same_gradients(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Of query, key and value of `qkv`: 4 heads of 40 rows see 50 keys."""
    named = [dict(zip(("query", "key", "value"), gradients, strict=True)) for gradients in (actual, expected)]
    wrong = gradient_complaints(*named, torch.float32, length=50, logit=10.0, rows=4 * 40)
    assert not wrong, wrong


# an operator of torch

GIVEN: dict[str, Callable[[], tuple[Any, ...]]] = {
    "statistics": lambda: (0.25, None, 0.0, None, None, None, None, 0, None, 0.0, None, False, True),
    "everything": lambda: (
        0.25,
        torch.rand(1, 4, 40, 1),
        5.0,
        torch.randn(1, 4, 40, 50, dtype=torch.bfloat16, requires_grad=True),
        torch.randn(1, 4, 1, 89, requires_grad=True),
        torch.rand(1, 4, 40, 50) < 0.7,
        torch.randn(4, requires_grad=True),
        3,
        7,
        0.2,
        torch.tensor(11),
        True,
        True,
    ),
    "no statistics": lambda: (0.25, None, 0.0, None, None, None, None, None, 9, 0.0, None, False, False),
}


# torch 2.14's own check hands tensors that are no leaves to its compiler
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_torch_s_own_check_of_operators_passes(name: str, dtype: torch.dtype) -> None:
    operator = torch.ops.sqrtdk_cpu.forward.default
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    done = torch.library.opcheck(operator, (*qkv(dtype=dtype), *GIVEN[name]()), test_utils=tests)
    assert set(done.values()) == {"SUCCESS"}


def test_torch_s_own_check_of_the_backward_operator_passes() -> None:
    query, key, value = (t.detach() for t in qkv())
    rows = torch.randn(1, 4, 40)
    numbers = (0.25, None, 0.0, torch.randn(1, 4, 1, 50).half(), torch.randn(1, 1, 1, 89), None, 0)
    numbers += (None, 0.2, torch.tensor(11), True, True)
    levels = torch.stack([rows.abs() + 4, rows.abs() + 5])
    given = (torch.randn(1, 4, 40, 16), query, key, value, levels, rows, rows, *numbers)
    assert set(torch.library.opcheck(torch.ops.sqrtdk_cpu.backward.default, given).values()) == {"SUCCESS"}


def test_torch_s_own_check_of_the_replay_passes() -> None:
    given = (torch.tensor(3), 0.3, (1, 2, 5, 13))
    assert set(torch.library.opcheck(torch.ops.sqrtdk_cpu.kept.default, given).values()) == {"SUCCESS"}


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "softcap, sinks, window": {"softcap": 4.0, "sinks": 0.0, "window": (9, None)},
    "alibi": {"bias": positions.alibi(4), "causal_lower_right": True},
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", OPTIONS)
def test_compiled_by_torch_it_gives_the_same(name: str) -> None:
    torch.compiler.reset()
    given = qkv()

    def run(*given: Tensor) -> Tensor:
        request = AuxRequest(lse=True, entropy_nats=True, max_logit=True)
        output, aux = sqrtdk.attention(*given, enable_gqa=True, impl="cpu", return_aux=request, **OPTIONS[name])
        return output.square().sum() + aux.entropy_nats.sum() - aux.lse.sum() + aux.max_logit.sum()

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    found, wanted = compiled(*given), run(*given)
    terms = 4 * 40 * 16  # squares that the total is a sum of
    assert complaint(found, wanted, torch.float32, length=50, logit=10.0, uses=terms) is None
    same_gradients(*(torch.autograd.grad(total, given) for total in (found, wanted)))


def test_exported_with_a_dynamic_length_it_gives_the_same() -> None:
    class Net(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return sqrtdk.attention(q, k, v, enable_gqa=True, impl="cpu", is_causal=True)

    length = torch.export.Dim("length", min=2, max=4096)
    sizes = {"q": {2: length}, "k": {2: length}, "v": {2: length}}
    given = [t.detach() for t in qkv(64, 64)]
    program = torch.export.export(Net(), tuple(given), dynamic_shapes=sizes)
    assert "sqrtdk_cpu.forward" in str(program.graph)
    longer = [t.detach() for t in qkv(90, 90)]
    assert complaint(program.module()(*longer), Net()(*longer), torch.float32, length=90, logit=10.0) is None


def test_exported_by_auto_it_needs_no_operator_of_ours() -> None:
    class Net(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return sqrtdk.attention(q, k, v, is_causal=True)

    given = tuple(torch.randn(1, 4, 512, 16) for _ in range(3))
    length = torch.export.Dim("length", min=2, max=4096)
    sizes = {name: {2: length} for name in "qkv"}
    program = torch.export.export(Net(), given, dynamic_shapes=sizes)
    assert "sqrtdk_cpu" not in str(program.graph)


def derivatives(impl: str, given: list[Tensor], **options: Any) -> tuple[Tensor, ...]:
    """First derivatives, and those of a function of them."""
    request = AuxRequest(lse=True, entropy_nats=True)
    output, aux = sqrtdk.attention(*given, enable_gqa=True, impl=impl, return_aux=request, **options)
    total = output.square().sum() + aux.lse.square().sum() + aux.entropy_nats.square().sum()
    first = torch.autograd.grad(total, given, create_graph=True)
    return *first, *torch.autograd.grad(sum(g.square().sum() for g in first), given)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"softcap": 3.0, "sinks": 0.5, "window": (4, 2)}])
def test_a_gradient_of_the_gradient_is_that_of_dense(options: dict[str, Any]) -> None:
    given = qkv()
    exact = [t.detach().double().requires_grad_() for t in given]
    mine, theirs = derivatives("cpu", given, **options), derivatives("dense", exact, **options)
    same_gradients(mine[:3], theirs[:3])
    same_gradients(mine[3:], theirs[3:])


@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")  # torch 2.11's own
def test_a_plain_gradient_runs_the_kernel() -> None:
    with torch.profiler.profile() as seen:
        everything(qkv())
    assert "sqrtdk_cpu::backward" in {event.key for event in seen.key_averages()}


def test_forward_mode_differentiation_is_left_to_others() -> None:
    q, k, v = (t.detach() for t in qkv())
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(UnsupportedError, match="forward-mode"):
            sqrtdk.attention(dual, k, v, enable_gqa=True, impl="cpu")
        output = sqrtdk.attention(dual, k, v, enable_gqa=True, softcap=20.0)
        assert forward_ad.unpack_dual(output).tangent is not None


def test_tensors_of_a_class_of_their_own_are_left_to_others() -> None:
    class Own(Tensor):
        pass

    q = torch.randn(1, 8, 1024, 64)
    assert sqrtdk.explain(q, q, q).impl == "cpu"
    choice = sqrtdk.explain(q.as_subclass(Own), q, q)
    assert choice.impl == "fused"
    assert "a class of their own" in choice.reason


# edges


@pytest.mark.parametrize("sizes", [(0, 2, 4, 4), (1, 2, 0, 4), (1, 2, 4, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_nothing_are_zero(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    batch, heads, length, keys = sizes
    given = [torch.randn(batch, heads, n, 8, dtype=dtype, requires_grad=True) for n in (length, keys, keys)]
    output, aux = sqrtdk.attention(*given, impl="cpu", return_aux=ALL)
    assert output.shape == (batch, heads, length, 8)
    gradients = torch.autograd.grad(output.sum() + aux.entropy_nats.sum(), given)
    assert all(g.shape == t.shape and not g.any() for g, t in zip(gradients, given, strict=True))


def same_as_dense(*given: Tensor, **options: Any) -> None:
    with torch.no_grad():
        found, wanted = (sqrtdk.attention(*given, impl=impl, return_aux=ALL, **options) for impl in ("cpu", "dense"))
    assert complaint(found[0], wanted[0], torch.float32, length=40, logit=10.0) is None
    for name in ALL.wanted:
        text = complaint(getattr(found[1], name), getattr(wanted[1], name), torch.float32, length=40, logit=10.0)
        assert text is None, f"{name}: {text}"


@pytest.mark.parametrize("keys", [40, 1100])
def test_a_mask_of_the_least_number_is_a_number(keys: int) -> None:
    q, k, v = (torch.randn(1, 2, n, 8) for n in (6, keys, keys))
    mask = torch.zeros(6, keys).masked_fill(torch.rand(6, keys) < 0.5, torch.finfo(torch.float32).min)
    mask[:, 0] = 0.0
    with torch.no_grad():
        output, aux = sqrtdk.attention(q, k, v, mask, impl="cpu", return_aux=ALL)
        wanted, _ = sqrtdk.attention(q, k, v, mask, impl="dense", return_aux=ALL)
    assert complaint(output, wanted, torch.float32, length=keys, logit=10.0) is None
    assert not any(getattr(aux, name).isnan().any() for name in ALL.wanted)
    assert (aux.variance == torch.inf).all()
    assert (aux.mean < -1e37).all()


def test_logits_whose_sum_is_no_number_have_weights() -> None:
    q, k = (2.5e18 * torch.randn(1, 1, n, 4) for n in (20, 600))
    v = torch.randn(1, 1, 600, 4)
    with torch.no_grad():
        found = sqrtdk.attention(q, k, v, scale=1.0, impl="cpu")
        wanted = sqrtdk.attention(q.double(), k.double(), v.double(), scale=1.0, impl="dense")
    fits = (q.double() @ k.double().mT).abs().amax(-1) < torch.finfo(torch.float32).max
    assert fits.sum() > 5
    assert complaint(found[fits], wanted[fits], torch.float32, length=600, logit=0.0) is None  # one key has all weight


def test_a_sink_of_no_weight_is_none() -> None:
    q, k, v = (torch.randn(1, 2, n, 8) for n in (6, 40, 40))
    same_as_dense(q, k, v, torch.rand(6, 40) < 0.5, sinks=torch.tensor([-torch.inf, 0.0]))
    blind = torch.zeros(6, 40, dtype=torch.bool)
    same_as_dense(q, k, v, blind, sinks=torch.tensor([-torch.inf, 0.0]))


@pytest.mark.parametrize("window", [(None, 2**63 - 2), (2**62, 2**62), (2**63, None)])
def test_a_window_beyond_all_keys_bounds_nothing(window: tuple[int | None, int | None]) -> None:
    q = torch.randn(1, 2, 6, 8)
    for impl in ("cpu", "dense"):
        assert torch.equal(sqrtdk.attention(q, q, q, window=window, impl=impl), sqrtdk.attention(q, q, q, impl=impl))


def test_a_softcap_that_float32_has_no_number_for_is_refused() -> None:
    q = torch.randn(1, 2, 6, 8)
    with pytest.raises(UnsupportedError, match="no number of float32"):
        sqrtdk.attention(q, q, q, softcap=1e-46, impl="cpu")


def test_a_bias_whose_rows_lie_far_apart_has_its_gradient() -> None:
    far = 2**31 // 15 + 9
    q = torch.randn(1, 1, 3, 8, requires_grad=True)
    bias = torch.zeros(2 * far + 16, dtype=torch.float32).as_strided((3, 3), (far, 1))
    (found,) = torch.autograd.grad(sqrtdk.attention(q, q, q, bias=bias, impl="cpu").sum(), q)
    (wanted,) = torch.autograd.grad(sqrtdk.attention(q, q, q, impl="dense").sum(), q)
    assert complaint(found, wanted, torch.float32, length=8, logit=10.0, uses=3) is None


@pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning")
@pytest.mark.parametrize("length", [2, 40])
def test_without_torch_s_library_bfloat16_is_widened(length: int) -> None:
    given = qkv(length, 600, torch.bfloat16)
    beside = everything(given)
    with torch.backends.mkldnn.flags(enabled=False):
        found = everything(given)
    exact = everything([t.detach().double().requires_grad_() for t in given], impl="dense")
    for mine, theirs, true in zip(found, beside, exact, strict=True):
        if mine.dtype == torch.bfloat16:
            assert half_complaint(mine, true, [theirs], mine.dtype, floor=true.abs().max().item()) is None
        else:
            assert complaint(mine, true, torch.float32, length=600, logit=10.0) is None


def test_a_window_reads_its_own_keys_alone() -> None:
    """NaN beyond would show, since a weight of 0 times NaN is NaN."""
    q, k, v = (torch.randn(1, 2, n, 8) for n in (1, 6000, 6000))
    v[:, :, :5000] = torch.nan
    above, below = 5999, 99 - 5999
    found = torch.ops.sqrtdk_cpu.forward(
        q, k, v, 0.3, None, 0.0, None, None, None, None, above, below, 0.0, None, False, False
    )[0]
    assert found.isfinite().all()


def test_inputs_are_not_changed_and_statistics_carry_no_gradient_but_of_lse_and_entropy() -> None:
    given = qkv()
    before = [t.detach().clone() for t in given]
    _, aux = sqrtdk.attention(*given, enable_gqa=True, impl="cpu", return_aux=ALL)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))
    assert {name for name in ALL.wanted if getattr(aux, name).requires_grad} == {"lse", "entropy_nats"}


# threads


def everything(given: list[Tensor], impl: str = "cpu", **options: Any) -> list[Tensor]:
    output, aux = sqrtdk.attention(*given, enable_gqa=True, impl=impl, return_aux=ALL, **options)
    gradients = torch.autograd.grad(output.sum() + aux.lse.sum() + aux.entropy_nats.sum(), given)
    return [output.detach(), *(t.detach() for t in aux), *gradients]


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("length", "keys"), [(300, 2100), (3, 5000)])
def test_runs_are_bit_equal(length: int, keys: int, dtype: torch.dtype) -> None:
    given = qkv(length, keys, dtype)
    first = everything(given, causal_lower_right=True)
    for _ in range(20):
        assert all(map(torch.equal, first, everything(given, causal_lower_right=True)))


def test_the_forward_pass_does_not_depend_on_the_number_of_threads() -> None:
    given = qkv(300, 1300)
    one = everything(given)[: -len(given)]
    torch.set_num_threads(2)
    try:
        two = everything(given)[: -len(given)]
    finally:
        torch.set_num_threads(1)
    assert all(map(torch.equal, one, two))


@pytest.mark.usefixtures("two_threads")
def test_eight_threads_at_once_give_what_one_gives() -> None:
    calls = [qkv(300, 700), qkv(2, 3000), qkv(130, 60, torch.bfloat16), qkv(70, 700, torch.float16)]
    wanted = [everything(given) for given in calls]
    wrong: list[str] = []

    def work(at: int) -> None:
        torch.set_num_threads(2)
        for turn in range(10):
            i = (at + turn) % len(calls)
            if not all(map(torch.equal, everything(calls[i]), wanted[i])):
                wrong.append(f"thread {at}, call {i}")

    workers = [threading.Thread(target=work, args=(at,)) for at in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong

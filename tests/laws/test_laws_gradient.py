"""Law `gradient`: planted faults of backward passes are named, and right backward passes are kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

import sqrtdk
from sqrtdk.audit.records import BROKEN, KEPT, NOT_ASKED
from sqrtdk.laws import ask, gradient
from sqrtdk.laws.backward.formula import _places, formula_gradients
from sqrtdk.laws.gradient import ask_within_bounds
from sqrtdk.laws.subject import subject_of
from sqrtdk.messages import Message
from sqrtdk.tracing.tensors import CallTensors, Term, Vector
from tests.hf.small import build, inputs_of, small_config
from tests.laws.backward_models import FAULTS, SIZES, One, features, model
from tests.support.kernel_here import needs_kernel

CASES = [(name, size) for size in SIZES for name in FAULTS]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("name", "size"), CASES)
def test_a_planted_fault_is_named_and_its_right_twin_is_kept(name: str, size: str) -> None:
    right, inputs = model(name, False, size)
    assert [(one.state, one.reason) for one in ask(right, inputs, "gradient").answers] == [(KEPT, "")]
    broken, inputs = model(name, True, size)
    answers = ask(broken, inputs, "gradient").answers
    expected = FAULTS[name]
    assert {one.state for one in answers} == {BROKEN}
    texts = [one.reason for one in answers]
    codes = {text.values["what"].id if text.id.endswith(".at") else text.id for text in texts}
    code = "no_mask" if (name, size) == ("padding", "not causal") else expected.code  # padding is all that is hidden
    assert codes == {f"laws.gradient.what.{code}"}, texts
    operands = [str((text.values["what"] if text.id.endswith(".at") else text).values["operands"]) for text in texts]
    if name.startswith("rounded"):  # what stays within the rounding of float32 is not named
        assert set(operands[0].split(", ")) <= set(expected.operands.split(", "))
    else:
        assert ", ".join(operands) == expected.operands
    assert {one.site for one in answers} == {"attn"}


def _gated(impl: str) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, aux = sqrtdk.attention(q, k, v, is_causal=True, return_aux=True, impl=impl)
        return out * torch.sigmoid(aux.lse)[..., None]

    return attend


def _math(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return sdpa(q, k, v, is_causal=True)


def _by_lse(use: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Return an attention whose output is changed by its lse, which has no graph."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        z = q @ k.mT * 0.25
        out = z.softmax(-1) @ v
        return use(out, z.logsumexp(-1).detach())

    return attend


LSE_CUT: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "gate": (lambda out, lse: out * torch.sigmoid(lse)[..., None], True),
    "in place": (lambda out, lse: out.mul(1.0).mul_((lse - 1.0).exp()[..., None]), True),
    "merged": (lambda out, lse: torch.cat([out, lse[..., None]], -1)[..., :16] * 2.0, True),
    "rows without keys": (lambda out, lse: out.masked_fill(lse.isinf()[..., None], 0.0), False),
    "its shape alone": (lambda out, lse: out * torch.ones_like(lse)[..., None], False),
    "for a log": (lambda out, lse: out if lse.max() > -1e9 else -out, False),
}


@pytest.mark.parametrize("name", LSE_CUT)
def test_an_lse_without_a_graph_that_the_graph_reads_is_a_fault(name: str) -> None:
    use, is_fault = LSE_CUT[name]
    answers = ask(One(_by_lse(use)), features(), "gradient").answers
    expected = ["the gradient of q, k is the formula's without the gradient of lse"] if is_fault else [""]
    assert [str(one.reason) for one in answers] == expected


def _relative(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A bias of positions that reads q, where samples and heads are one axis, as in SpeechT5."""
    z = (q @ k.mT * 0.25).flatten(0, 1)
    table = torch.randn(q.shape[2], 16, generator=torch.Generator().manual_seed(2)).to(q.dtype)
    z += q.contiguous().flatten(0, 1) @ table.mT
    return z.softmax(-1).view(*q.shape[:3], -1) @ v


def _far_below(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A mask of -1e10, which is no number that hides a key whole."""
    return (q @ k.mT * 0.25 + torch.ones(q.shape[2], q.shape[2]).triu(1).to(q.dtype) * -1e10).softmax(-1) @ v


def _copied(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Between its products, k is copied as for a cache that keeps its graph, and q as for a gate."""
    z = q @ k.mT * 0.25
    gate, _ = torch.sigmoid(q.transpose(1, 2).flatten(2).mean(-1)), k.clone()
    return (z.softmax(-1) @ v) * gate[:, None, :, None]


IMPLEMENTATIONS = ["tiled", "dense", pytest.param("cpu", marks=needs_kernel)]
RIGHT: dict[str, Callable[..., Tensor]] = {
    "fused": lambda q, k, v: sdpa(q, k, v, is_causal=True),
    "math": _math,
    "dropout of a fused call": lambda q, k, v: sdpa(q, k, v, is_causal=True, dropout_p=0.2),
    "groups": lambda q, k, v: sdpa(q, k[:, ::2], v[:, ::2], enable_gqa=True),
    "autocast": lambda q, k, v: sdpa(q.bfloat16(), k.bfloat16(), v.bfloat16()).to(q.dtype),
    "written to in place": lambda q, k, v: ((q.mul(1.0).mul_(0.5) @ k.mT).softmax(-1) @ v).add_(v),
    "one tensor for k and v": lambda q, k, v: sdpa(q, v, v),
    "a bias that reads q": _relative,
    "a mask of -1e10": _far_below,
    "copies of q and k": _copied,
    "k that is read elsewhere": lambda q, k, v: sdpa(q, k, v) + k.square(),
}


def test_some_heads_stand_for_all_each_counted_once_and_others_the_next_time() -> None:
    q, k, v, d_out = torch.randn(4, 2, 4, 6, 8, generator=torch.Generator().manual_seed(0))
    call = CallTensors("", 0, Vector(q), Vector(k), Vector(v), d_out, (Term("scale", 0.25),))
    whole = formula_gradients(call, d_out)
    for count in range(1, 8):
        looked = torch.zeros(2, 4, dtype=torch.bool)
        for turn in range(8):
            some = formula_gradients(call, d_out, most=count * 36, turn=turn)
            assert 1 <= int(some.looked.sum()) <= count
            torch.testing.assert_close(some.values["k"][some.looked], whole.values["k"][some.looked])
            looked |= some.looked
        assert bool(looked.all())


@pytest.mark.full
def test_weights_below_the_least_normal_number_are_no_fault() -> None:
    module = build(small_config("swin"), "sdpa", torch.float32).train()  # hides by -100, and learns its bias
    assert [(one.state, one.reason) for one in ask(module, inputs_of(module), "gradient").answers] == [(KEPT, "")]


@pytest.mark.full
@pytest.mark.parametrize("name", RIGHT)
def test_right_backward_passes_are_kept(name: str) -> None:
    for module, inputs in (
        (One(RIGHT[name]).train(), features()),
        (One(RIGHT[name]).bfloat16().train(), {"x": features()["x"].bfloat16()}),
    ):
        answers = ask(module, inputs, "gradient").answers
        expected = (NOT_ASKED, KEPT) if "one tensor" in name else (KEPT,)
        assert {one.state for one in answers} <= {*expected}, [str(one.reason) for one in answers]


class Learned(One):
    """An attention with a learned factor."""

    def __init__(self, attend: Callable[..., Tensor], tau: float) -> None:
        super().__init__(lambda q, k, v: attend(self.tau, q, k, v))
        self.tau = nn.Parameter(torch.tensor(tau))


def _bias() -> Tensor:
    return torch.randn(4, 40, 40, generator=torch.Generator().manual_seed(3))


LEARNED: dict[str, tuple[Callable[..., Tensor], float]] = {
    "after a bias": (lambda tau, q, k, v: ((q @ k.mT * 0.25 + _bias()) * tau).softmax(-1) @ v, 1.3),
    "after a softcap": (lambda tau, q, k, v: (0.3 * torch.tanh(q @ k.mT) * tau).softmax(-1) @ v, 1.3),
    "on q and k": (lambda tau, q, k, v: ((q * tau) @ (k * tau).mT * 0.25).softmax(-1) @ v, 1.3),
    "on q and v": (lambda tau, q, k, v: ((q * tau) @ k.mT * 0.25).softmax(-1) @ (v * tau), 1.3),
    "a square that is 1": (lambda tau, q, k, v: (q @ k.mT * tau**2).softmax(-1) @ v, 1.0),
}


@pytest.mark.parametrize("name", LEARNED)
def test_a_learned_factor_that_does_more_than_scale_the_product_is_no_fault(name: str) -> None:
    answers = ask(Learned(*LEARNED[name]), features(), "gradient").answers
    assert [(one.state, one.reason) for one in answers] == [(KEPT, "")]


def test_a_learned_factor_after_a_bias_that_gets_no_gradient_is_named() -> None:
    attend, tau = LEARNED["after a bias"]
    module = Learned(lambda tau, q, k, v: attend(tau.detach(), q, k, v), tau)
    texts = [str(one.reason) for one in ask(module, features(), "gradient").answers]
    assert texts == ["no gradient reaches tau: detached, or left out of the backward pass"]


def test_a_projection_of_zeros_is_no_fault() -> None:
    module = One(lambda q, k, v: (q @ (k * 0.25).mT).softmax(-1) @ v)
    for parameter in module.k.parameters():
        nn.init.zeros_(parameter)
    answers = ask(module, features(), "gradient").answers
    assert [(one.state, str(one.reason)) for one in answers] == [(KEPT, "the gradients of k were not judged")]


@pytest.mark.parametrize("count", range(1, 9))
def test_heads_that_stand_for_all_are_computed_once(count: int) -> None:
    rows, columns = 40, 50
    for turn in (0, 3):
        places = list(_places(2, 8, 4, rows, columns, count * 2 * rows * columns, turn))
        assert len({(b.start, h.start) for b, h, _ in places}) == len(places)
        assert len(places) == count or (count == 8 and len(places) == 1)  # all at once


@pytest.mark.full
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_our_own_backward_passes_are_kept(impl: str) -> None:
    grouped = One(lambda q, k, v: sqrtdk.attention(q, k, v, is_causal=True, enable_gqa=True, impl=impl), 2)
    banded = One(lambda q, k, v: sqrtdk.attention(q, k, v, is_causal=True, softcap=2.0, window=7, impl=impl))
    for module in (grouped, banded, One(_gated(impl))):
        assert [(one.state, one.reason) for one in ask(module, features(), "gradient").answers] == [(KEPT, "")]


@pytest.mark.full
def test_multi_head_attention_and_encoder_layers_are_reached() -> None:
    x = features(12)["x"]
    attention = nn.MultiheadAttention(64, 4, dropout=0.3, batch_first=True)
    layer = nn.TransformerEncoderLayer(64, 4, dropout=0.1)
    for module, inputs in ((attention, {"query": x, "key": x, "value": x}), (layer, {"src": x})):
        assert [(one.state, one.reason) for one in ask(module, inputs, "gradient").answers] == [(KEPT, "")]


@pytest.mark.full
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "t5", "bert"])
def test_transformers_types_are_kept_with_and_without_checkpoints(kind: str, reentrant: bool) -> None:
    model = build(small_config(kind), "eager" if reentrant else "sdpa", torch.float32).train()
    if model.supports_gradient_checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": reentrant})
    answers = ask(model, inputs_of(model), "gradient").answers
    assert [(one.state, one.reason) for one in answers] == [(KEPT, "")]


class Apart(One):
    """Runs its attention in another mode of autograd."""

    def __init__(self, mode: Callable[[], Any]) -> None:
        super().__init__(sdpa)
        self.mode = mode

    def forward(self, x: Tensor) -> Tensor:
        with self.mode():
            return super().forward(x)


def _written_over(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = (q @ k.mT * 0.25).softmax(-1)
    out = p @ v
    p.mul_(2.0)
    return out


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (One(sdpa).requires_grad_(False), "laws.gradient.nothing_trains"),
        (Apart(torch.inference_mode), "laws.gradient.no_graph"),
        (Apart(torch.no_grad), "laws.gradient.no_graph"),
        (One(_written_over), "laws.gradient.refused"),
    ],
    ids=["frozen", "inference mode", "no_grad", "written over"],
)
def test_what_has_no_gradient_is_not_asked(module: nn.Module, reason: str) -> None:
    (answer,) = ask(module, features(), "gradient").answers
    assert answer.state == NOT_ASKED
    assert isinstance(answer.reason, Message)
    assert answer.reason.id == reason


def test_a_run_changes_nothing_of_the_model() -> None:
    module = One(sdpa)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    applied = torch.autograd.Function.apply
    ask(module, features(), "gradient")
    assert torch.autograd.Function.apply == applied
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q, k, v, is_causal=True)


def cut_off(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q, k.detach(), v, is_causal=True)


LENGTHS: list[int] = []


class Counting(One):
    """Notes the tokens of each run with autograd outside of itself: what a model holds is put back."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            LENGTHS.append(x.shape[1])
        return super().forward(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_a_name_it_is_asked_of_the_first_tokens_where_these_stand_for_all(
    dtype: torch.dtype,
) -> None:
    def lengths_of(attend: Callable[..., Tensor], state: str) -> list[int]:
        LENGTHS.clear()
        subject = subject_of(Counting(attend).to(dtype), {"x": features()["x"].to(dtype)})
        subject.first = subject.over({"x": subject.inputs["x"][:, :5]})
        assert [answer.state for answer in ask_within_bounds(subject)] == [state]
        return [*LENGTHS]

    dtypes = 2 if dtype == torch.bfloat16 else 1  # as a float32 copy, and as it is
    assert lengths_of(causal, KEPT) == [5] * dtypes
    # No law is broken by first tokens alone.
    assert lengths_of(cut_off, BROKEN) == [5] * dtypes + [40] * dtypes


def test_without_a_name_much_memory_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    module = One(causal)
    monkeypatch.setattr(gradient, "MOST_GRAPH_BYTES", 1)
    states = {answer.law: answer for answer in ask(module, features()).answers}
    assert states["gradient"].state == NOT_ASKED
    assert getattr(states["gradient"].reason, "id", "") == "laws.gradient.costly"
    (named,) = ask(module, features(), "gradient").answers
    assert named.state == KEPT


@pytest.mark.parametrize(
    ("sizes", "expected"), [((2, 3, 5, 7, 4), 4 * 2 * 3 * 5 * (4 * 7 + 32 * 4)), ((1, 12, 2048, 2048, 64), 1006632960)]
)
def test_what_autograd_keeps_is_estimated(sizes: tuple[int, ...], expected: int) -> None:
    batch, heads, rows, keys, width = sizes
    q, k = torch.zeros(batch, heads, rows, width, device="meta"), torch.zeros(batch, heads, keys, width, device="meta")

    class Alone(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return sdpa(q, k, k)

    report = sqrtdk.check(Alone(), (q, k), laws="none")
    assert gradient.graph_bytes(report.calls) == expected

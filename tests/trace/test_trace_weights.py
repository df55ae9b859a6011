"""What stands between the product, the softmax and the values beside the textbook's steps: each is read or named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sqrtdk
from sqrtdk.tracing import AttentionCall, Trace
from tests.attentions.each import each

B, H, L, E = 2, 4, 12, 8
SCALE = E**-0.5
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Net(nn.Module):
    """Self-attention with a function of q, k and v in the middle."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.qkv, self.attend = nn.Linear(H * E, 3 * H * E), attend

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(*self.qkv(x).unflatten(-1, (3, H, E)).permute(2, 0, 3, 1, 4))


def run_of(model: nn.Module, *inputs: Tensor) -> Trace:
    with torch.no_grad(), sqrtdk.trace(model) as run:
        model(*inputs)
    return run


def read(attend: Attend, device: str = "cpu") -> AttentionCall:
    (call,) = run_of(Net(attend).to(device), torch.randn(B, L, H * E, device=device)).calls
    return call


def past(like: Tensor, rows: int = L) -> Tensor:
    """1 where a row may see the key: the last `rows` rows of a causal mask."""
    return torch.ones(L, L, device=like.device).tril()[-rows:]


def weights(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT * SCALE).softmax(-1)


def rope(x: Tensor) -> Tensor:
    angle = torch.arange(x.shape[-2])[:, None] * 100.0 ** (-torch.arange(0, E, 2) / E)
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
    return x * cos + torch.cat([-x[..., E // 2 :], x[..., : E // 2]], -1) * sin


def changed_after(call: AttentionCall) -> list[tuple[str, str]]:
    return [(stage.name, stage.detail) for stage in call.stages if stage.where == "weights"]


# -- a mask multiplied with the logits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@each("rows", [L, 3])
@each("turn", [lambda x: x, rope])
def test_a_mask_multiplied_with_the_logits_is_not_followed(
    turn: Callable[[Tensor], Tensor], rows: int, seed: int
) -> None:
    torch.manual_seed(seed)
    call = read(lambda q, k, v: (turn(q)[:, :, -rows:] @ turn(k).mT * SCALE * past(q, rows)).softmax(-1) @ v)
    assert call.unknown == ("mul by a 0/1 mask",)
    assert call.scale.effective is None


def test_another_step_over_the_logits_is_not_told_from_the_diagonal() -> None:
    call = read(lambda q, k, v: (rope(q) @ rope(k).mT * SCALE).tril().softmax(-1) @ v)
    assert (call.unknown, call.scale.effective) == (("tril",), None)


@each("device", ["cpu", "meta"])
@each("ahead", [0, 2])
def test_the_first_half_of_a_mask_needs_its_second(ahead: int, device: str) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        hidden = torch.ones(L, L, device=q.device).triu(1 + ahead)
        return (q @ k.mT * SCALE * past(q) - 1e4 * hidden).softmax(-1) @ v

    call = read(attend, device)
    assert call.unknown == (("mul by a 0/1 mask",) if ahead else ())
    assert call.scale.effective == (None if ahead else pytest.approx(SCALE))


# -- after the softmax -------------------------------------------------------------------------------------------------


def _written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    w = weights(q, k)
    w[:, :, past(q) == 0] = 0
    return w @ v


MASKED: dict[str, Attend] = {
    "mul": lambda q, k, v: weights(q, k) * past(q) @ v,
    "tril": lambda q, k, v: weights(q, k).tril() @ v,
    "masked_fill": lambda q, k, v: weights(q, k).masked_fill(past(q) == 0, 0.0) @ v,
    "where": lambda q, k, v: torch.where(past(q) > 0, weights(q, k), 0.0) @ v,
    "index": _written,
    "in place": lambda q, k, v: weights(q, k).masked_fill_(past(q) == 0, 0.0) @ v,
    "like": lambda q, k, v: (w := weights(q, k)) * torch.ones_like(w).tril() @ v,
}


@each("device", ["cpu", "meta"])
@pytest.mark.parametrize("way", MASKED)
def test_a_mask_after_the_softmax_is_seen_however_it_is_written(way: str, device: str) -> None:
    call = read(MASKED[way], device)
    assert changed_after(call) == [("mask", "after the softmax")]
    assert call.scale.effective == pytest.approx(SCALE)
    assert call.future_weight is None


def test_a_mask_that_is_divided_by_the_sum_says_so() -> None:
    call = read(lambda q, k, v: (w := weights(q, k).tril()) / w.sum(-1, keepdim=True) @ v)
    assert [name for name, _ in changed_after(call)] == ["mask", "normalise"]


@each("device", ["cpu", "meta"])
@each(
    "step, name",
    [
        (lambda w: w * 3, "mul"),
        (lambda w: w + w**2, "add"),
        (lambda w: w**2, "pow"),
        (lambda w: w.mul_(3), "mul"),
        (lambda w: w.mean(2, keepdim=True), "mean"),
    ],
)
def test_weights_that_were_changed_are_not_judged(step: Callable[[Tensor], Tensor], name: str, device: str) -> None:
    call = read(lambda q, k, v: step(weights(q, k)) @ v, device)
    assert changed_after(call) == [("unknown", name)]
    assert call.unknown == (f"{name} on the weights",)
    if device == "cpu":
        assert call.scale.effective is None


def test_a_column_written_in_place_is_not_silent() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        w = weights(q, k)
        w[..., 3] = 0
        return w @ v

    assert changed_after(read(attend)) != []


def _shown(w: Tensor) -> Tensor:
    """A map of the weights that somebody looks at changes nothing."""
    assert (w.mean(1) * 3 + 1).tril() is not None
    return w


QUIET: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda w: functional.dropout(w, 0.3),
    "one": lambda w: w * 1.0,
    "head mask": lambda w: w * torch.tensor([0.0, 1.0, 0.5, 1.0]).view(1, H, 1, 1),
    "padded rows": lambda w: w * (torch.arange(L) < 9)[:, None],
    "rows filled": lambda w: w.masked_fill((torch.arange(L) > 9)[:, None], 0.0),
    "own sum": lambda w: w / w.sum(-1, keepdim=True),
    "views": lambda w: w.flatten(0, 1).to(torch.float64).float().unflatten(0, (B, H)),
    "no NaN": torch.nan_to_num,
    "shown": _shown,
}


@pytest.mark.parametrize("step", QUIET)
def test_what_changes_no_weight_of_a_key_stays_quiet(step: str) -> None:
    call = read(lambda q, k, v: QUIET[step](weights(q, k)) @ v)
    assert (changed_after(call), call.unknown) == ([], ())
    assert call.scale.agree is True


def test_hiding_again_what_is_hidden_changes_nothing() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        future = past(q) == 0
        return (q @ k.mT * SCALE).masked_fill(future, -torch.inf).softmax(-1).masked_fill(future, 0.0) @ v

    assert changed_after(read(attend)) == []
    assert changed_after(read(attend, "meta")) == []


THINNED: dict[str, Callable[[Tensor], Tensor]] = {
    "compared": lambda w: w * (w >= w.topk(4).values[..., -1:]),
    "filled": lambda w: w.masked_fill(w < 0.1, 0.0),
    "scattered": lambda w: w * torch.zeros_like(w).scatter(-1, w.topk(4).indices, 1.0),
}


@pytest.mark.parametrize("way", THINNED)
def test_top_k_of_the_weights_is_no_mask(way: str) -> None:
    call = read(lambda q, k, v: THINNED[way](weights(q, k)) @ v)
    assert [name for name, _ in changed_after(call)] == ["thin"]
    assert call.unknown == ()


# -- the axis ----------------------------------------------------------------------------------------------------------


@each("device", ["cpu", "meta"])
@each("dim, word", [(0, "another axis"), (1, "another axis"), (2, "over the queries"), (3, None), (-1, None)])
def test_the_softmax_runs_over_what_the_value_product_sums(dim: int, word: str | None, device: str) -> None:
    call = read(lambda q, k, v: (q @ k.mT * SCALE).softmax(dim) @ v, device)
    assert [word in name for name in call.unknown] == ([True] if word else [])
    assert (call.scale.effective is None) == bool(word)


def test_another_layout_with_dropout_is_right() -> None:
    """Keys on axis 1 of (i, j, b, n), where no row of the last axes sums to 1."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        z = torch.einsum("bnid,bnjd->ijbn", q, k) * SCALE
        return torch.einsum("ijbn,bnjd->bnid", functional.dropout(z.softmax(1), 0.3), v)

    call = read(attend)
    assert (call.unknown, call.scale.agree) == ((), True)


# -- q and k from different latents ------------------------------------------------------------------------------------


class Latents(nn.Module):
    """Multi-head latent attention by hand, or q and k from two norms; `memory` makes it attend across."""

    def __init__(self, compressed: bool) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(32, 16) if compressed else nn.Identity() for _ in range(2))
        width = 16 if compressed else 32
        self.norm = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.q, self.kv = nn.Linear(width, 32), nn.Linear(width, 64)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        q = self.q(self.norm[0](self.down[0](x))).unflatten(-1, (H, E)).transpose(1, 2)
        k, v = self.kv(self.norm[1](self.down[1](memory))).unflatten(-1, (2, H, E)).permute(2, 0, 3, 1, 4)
        return weights(q, k) @ v


@each("compressed", [True, False])
def test_q_and_k_from_two_latents_of_one_input_are_self_attention(compressed: bool) -> None:
    x, memory = torch.randn(2, B, L, 32)
    model = Latents(compressed)
    (call,) = run_of(model, x, x).calls
    assert call.self_attention is True
    (call,) = run_of(model, x, memory.clone()).calls
    assert call.self_attention is False


def test_a_decoder_attends_across_what_an_encoder_gave() -> None:
    model = nn.Transformer(32, 4, 1, 1, 64, batch_first=True)
    calls = run_of(model.train(), torch.randn(B, L, 32), torch.randn(B, L, 32)).calls
    assert [call.self_attention for call in calls] == [True, True, False]


# -- packed operands ---------------------------------------------------------------------------------------------------


@torch.library.custom_op("sqrtdk_tests::packed", mutates_args=())
def packed(qkv: Tensor) -> Tensor:
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    return (weights(q, k) @ v).transpose(1, 2).contiguous()


@torch.library.custom_op("sqrtdk_tests::two", mutates_args=())
def two(q: Tensor, kv: Tensor) -> Tensor:
    k, v = kv.permute(2, 0, 3, 1, 4)
    return (weights(q.transpose(1, 2), k) @ v).transpose(1, 2).contiguous()


@torch.library.custom_op("sqrtdk_tests::flat", mutates_args=())
def flat(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weights(q, k) @ v


@torch.library.custom_op("sqrtdk_tests::my_attn", mutates_args=())
def my_attn(x: Tensor) -> Tensor:
    return weights(x, x) @ x


@torch.library.custom_op("sqrtdk_tests::gate", mutates_args=())
def gate(a: Tensor, b: Tensor) -> Tensor:
    return a.sigmoid() * b


class Kernel(nn.Module):
    """Hands the shapes of packed attention kernels to an operation whose inside is not seen."""

    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.qkv, self.call = nn.Linear(32, 96), call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.qkv(x).unflatten(-1, (3, H, E)))


@each(
    "call, name",
    [
        (packed, "packed"),
        (lambda qkv: two(qkv[:, :, 0].clone(), qkv[:, :, 1:].clone()), "two"),
        (lambda qkv: flat(*qkv[0, :, :, 0].unbind(1)), "flat"),
        (lambda qkv: my_attn(qkv[0, :, 0, 0]), "my_attn"),
        (lambda qkv: gate(qkv[:, :, 0].clone(), qkv[:, :, 1].clone()), None),
    ],
)
def test_an_opaque_kernel_is_named_however_its_operands_are_packed(
    call: Callable[[Tensor], Tensor], name: str | None
) -> None:
    lost = [missed.reason for missed in run_of(Kernel(call), torch.randn(B, L, 32)).not_measured]
    assert [f"sqrtdk_tests::{name} is opaque" in reason for reason in lost] == ([True] if name else [])


class Joined(nn.Module):
    """Weights that a matrix joins, which the inputs give or the module holds."""

    def __init__(self, step: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.qkv, self.step = nn.Linear(H * E, 3 * H * E), step
        self.register_buffer("held", (torch.arange(float(L * L)).reshape(L, L) % 3) / 5)

    def forward(self, x: Tensor, given: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, H, E)).permute(2, 0, 3, 1, 4)
        return self.step(weights(q, k), self.held if given is None else given[:, None]) @ v


JOINED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "half of another matrix": (lambda w, a: 0.5 * w + 0.5 * a, "plus another tensor"),
    "another matrix": (lambda w, a: w + a, "plus another tensor"),
    "another matrix first": (lambda w, a: a + w, "plus another tensor"),
    "less another matrix": (lambda w, a: w - a, "less another tensor"),
    "a matrix less the weights": (lambda w, a: a - w, "less another tensor"),
    "weighed by a matrix": (lambda w, a: w * (a + 0.5), "times another tensor"),
    "over a matrix": (lambda w, a: w / (a + 0.5), "divided by another tensor"),
    "averaged": (lambda w, a: torch.lerp(w, a.expand_as(w), 0.3), "averaged with another tensor"),
    "in part": (lambda w, a: torch.where(a > 0.2, a + 0.1, w), "in part another tensor"),
    "the identity": (lambda w, a: w + torch.eye(w.shape[-1]).to(w), "plus another tensor"),
    "less a number": (lambda w, a: w - 1 / w.shape[-1], "less a constant"),
    "less their mean": (lambda w, a: w - w.mean(-1, keepdim=True), "less another tensor"),
    "in place": (lambda w, a: w.add_(a), "plus another tensor"),
}


@each("device", ["cpu", "meta"])
@each("given", [True, False])
@pytest.mark.parametrize("way", JOINED)
def test_weights_that_another_tensor_joins_are_judged(way: str, given: bool, device: str) -> None:
    """The scale is what it was; what joined them is told, whether the inputs hold it or the code does."""
    step, detail = JOINED[way]
    inputs = [torch.randn(B, L, H * E), *([torch.rand(B, L, L)] if given else [])]
    (call,) = run_of(Joined(step).to(device), *(tensor.to(device) for tensor in inputs)).calls
    factor = device == "meta" and not given and detail.split()[0] in ("times", "divided")  # it may be all ones
    assert changed_after(call) == ([] if factor else [("joined", detail)])
    assert call.unknown == ()
    assert call.scale.effective == pytest.approx(SCALE)

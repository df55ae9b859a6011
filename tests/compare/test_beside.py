"""`diff` where a module does something besides its attention: what is named there, and when the attentions explain all.

The checkpoint of B is A's with two weights exchanged, as a wrong row of a loader's table gives it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from sqrtdk.compare.diff import diff

WIDTH, HEADS = 32, 2
IDS = torch.arange(16).view(2, 8)
State = dict[str, Tensor]


class Gated(nn.Module):
    """Attention with an output gate, `o_proj(heads * sigmoid(g_proj(x)))`, or a norm in its place."""

    def __init__(self, normed: bool) -> None:
        super().__init__()
        for name in "qkvgo":
            self.add_module(f"{name}_proj", nn.Linear(WIDTH, WIDTH, bias=False))
        self.sub_norm = nn.RMSNorm(WIDTH, eps=1e-6) if normed else None
        self.is_causal = True

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        heads = heads * torch.sigmoid(self.g_proj(x)) if self.sub_norm is None else self.sub_norm(heads)
        out: Tensor = self.o_proj(heads)
        return out


class Decoder(nn.Module):
    def __init__(self, normed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(16, WIDTH), nn.Linear(WIDTH, 16)
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH, eps=1e-6) for _ in range(2))
        self.layers = nn.ModuleList(Gated(normed) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        logits: Tensor = self.head(x)
        return logits


class WithTorchs(nn.Module):
    """A decoder layer around torch's own attention, which holds q, k and v in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.attend = nn.Embedding(16, WIDTH), nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return x + self.attend(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


def exchanged(one: str, other: str) -> Callable[[State], None]:
    def change(state: State) -> None:
        state[one], state[other] = state[other], state[one]

    return change


def said(a: nn.Module, change: Callable[[State], None]) -> str:
    b, state = copy.deepcopy(a), {name: tensor.clone() for name, tensor in a.state_dict().items()}
    change(state)
    b.load_state_dict(state)
    return " ".join(map(str, diff(a, b, IDS).paragraphs))


@pytest.mark.parametrize(
    ("one", "other"),
    [("0.q_proj", "0.g_proj"), ("0.k_proj", "0.g_proj"), ("0.v_proj", "0.o_proj"), ("0.q_proj", "1.g_proj")],
)
def test_both_weights_of_an_exchange_are_named(one: str, other: str) -> None:
    one, other = f"layers.{one}", f"layers.{other}"
    text = said(Decoder(), exchanged(f"{one}.weight", f"{other}.weight"))
    assert f"B's `{one}` holds A's `{other}`." in text
    assert f"Another difference is in `{other}`: B's `weight` is that of A's `{one}`." in text
    assert "explain all of it" not in text
    assert "Nothing else differs." in text


def test_the_attentions_explain_all_of_it_where_a_gate_is_the_same() -> None:
    text = said(Decoder(), exchanged("layers.0.q_proj.weight", "layers.0.k_proj.weight"))
    assert "The attentions explain all of it." in text


def test_what_is_between_the_heads_and_the_last_projection_is_not_called_explained() -> None:
    def also_norm(state: State) -> None:
        exchanged("layers.0.q_proj.weight", "layers.0.k_proj.weight")(state)
        state["layers.0.sub_norm.weight"] += torch.linspace(0, 1, WIDTH)

    # The heads of B reach a norm that is not A's, and the run of A has other heads there.
    text = said(Decoder(normed=True), also_norm)
    assert "Outside the modules of the attentions nothing else differs." in text
    assert "explain all of it" not in text
    text = said(Decoder(normed=True), exchanged("layers.0.q_proj.weight", "layers.0.k_proj.weight"))
    assert "The attentions explain all of it." in text


def test_a_projection_that_torch_reads_without_a_call_is_not_called_explained() -> None:
    def halved(state: State) -> None:
        state["attend.in_proj_weight"][:WIDTH] *= 0.5

    def also_out(state: State) -> None:
        halved(state)
        state["attend.out_proj.weight"] *= torch.linspace(1, 2, WIDTH)

    assert "The attentions explain all of it." in said(WithTorchs(), halved)
    text = said(WithTorchs(), also_out)
    assert "Outside the modules of the attentions nothing else differs." in text
    assert "explain all of it" not in text

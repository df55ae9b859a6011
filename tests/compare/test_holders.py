"""Weights that were loaded into another place: named by the weight of A that B holds, where all numbers agree."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from sqrtdk import diff
from sqrtdk.compare.causes.parameters import holder_of
from sqrtdk.compare.fixes import fix_of
from sqrtdk.compare.records import DiffReport
from tests.compare.decoders import without_lines

WIDTH, IDS = 16, torch.arange(14).view(2, 7)
State = dict[str, Tensor]


class Attend(nn.Module):
    """Causal attention with a projection each, and what comes behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH, False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (2, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(heads.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend, self.up, self.down = Attend(), nn.Linear(WIDTH, WIDTH, False), nn.Linear(WIDTH, WIDTH, False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(functional.layer_norm(x, (WIDTH,)))
        return x + self.down(self.up(functional.layer_norm(x, (WIDTH,))).relu())


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(14, WIDTH), nn.ModuleList(Layer() for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x


def loaded(change: Callable[[State], None] = lambda state: None) -> Decoder:
    torch.manual_seed(5)
    model = Decoder().eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    change(state)
    model.load_state_dict(state)
    return model


def exchange(*pairs: tuple[str, str]) -> Callable[[State], None]:
    def change(state: State) -> None:
        for one, other in pairs:
            one, other = f"{one}.weight", f"{other}.weight"
            state[one], state[other] = state[other], state[one]

    return change


def text_of(report: DiffReport) -> str:
    return without_lines(" ".join(str(one) for one in report.paragraphs))


def test_a_projection_that_holds_another_one_of_its_module() -> None:
    swap = exchange(("layers.1.attend.q_proj", "layers.1.attend.k_proj"))
    report = diff(loaded(), loaded(swap), IDS)
    assert "B's `q_proj` holds A's `k_proj` and B's `k_proj` holds A's `q_proj`" in text_of(report)
    assert "fused" not in text_of(report)
    (fix,) = {fix_of(cause) for cause in report.pairs[1].causes} - {None}
    assert fix is not None
    assert fix.startswith("load the weights of q and k under their own names")


def test_layers_that_are_exchanged_and_what_is_behind_their_attention() -> None:
    parts = ("q_proj", "k_proj", "v_proj", "o_proj")
    report = diff(loaded(), loaded(exchange(*((f"layers.0.attend.{x}", f"layers.2.attend.{x}") for x in parts))), IDS)
    said = text_of(report)
    assert "Layers 0 and 2 are exchanged: for q, k and v, `layers.0.attend` of B holds the weights of A's" in said
    assert "`layers.0.attend.o_proj`: B's `weight` is that of A's `layers.2.attend.o_proj`" in said
    assert "explain all of it" not in said
    assert "Nothing else differs" in said


def test_what_explains_all_is_still_said() -> None:
    swap = exchange(("layers.1.attend.k_proj", "layers.1.attend.v_proj"))
    assert "explain all of it" in text_of(diff(loaded(), loaded(swap), IDS))


def _copied(state: State) -> None:
    state["layers.1.attend.q_proj.weight"] = state["layers.0.up.weight"].mT.contiguous()


def _mixed(state: State) -> None:
    state["layers.1.up.weight"] = state["layers.1.up.weight"].flip(0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_copied, "B's `layers.1.attend.q_proj` holds A's `layers.0.up`, transposed."),
        (_mixed, "`layers.1.up`: B's `weight` is A's `layers.1.up`, with its rows in another order"),
    ],
)
def test_other_forms_of_a_weight(change: Callable[[State], None], said: str) -> None:
    assert said in text_of(diff(loaded(), loaded(change), IDS))


def test_only_what_all_numbers_show_is_said() -> None:
    q, k, fused = torch.randn(3, 8, 8)
    fused = torch.cat([fused, k])
    weights = {"q.weight": q, "fused.weight": fused}
    assert str(holder_of(k, weights).text) == "rows 8 to 15 of A's `fused`"  # type: ignore[union-attr]
    assert holder_of(q.bfloat16(), weights).name == "q.weight"  # type: ignore[union-attr]
    near = q.clone()
    near[-1, -1] += 0.01
    assert holder_of(near, weights) is None
    assert holder_of(torch.zeros(8, 8), {"zeros.weight": torch.zeros(8, 8)}) is None
    stored = {"c_attn.weight": q[:, :4].mT.contiguous(), "other.weight": k[:, :4].mT.contiguous()}  # (D, rows)
    assert not holder_of(k[:, :4], stored, "c_attn.weight").turned  # type: ignore[union-attr]


def test_a_weight_rounded_to_bfloat16_is_not_told_as_another_one() -> None:
    def rounded(state: State) -> None:
        for name in ("layers.0.attend.o_proj.weight", "layers.1.up.weight"):
            state[name] = state[name].bfloat16().float()

    said = text_of(diff(loaded(), loaded(rounded), IDS))
    assert "`layers.0.attend.o_proj`: B's `weight` is A's rounded to bfloat16" in said
    assert "`layers.1.up`: `weight` has other numbers" in said or "The same holds for layers.1.up" in said
    assert "is that of A's" not in said

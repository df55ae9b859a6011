"""A gate that only one side runs, or another activation of it, is named where the models begin to differ."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sqrtdk
from sqrtdk.tracing.probe.gates import GATE_ACTIVATIONS, NO_ACTIVATION, Gate, Numbers, gate_of

WIDTH, HEADS, ROWS = 32, 4, 10
Activation = Callable[[Tensor], Tensor]


def model(
    gate: Activation | None, act: Activation = functional.silu, *, fused: bool = False, late: bool = False,
    unused: bool = False,
) -> nn.Module:  # fmt: skip
    """Two attentions with a gate, and a gated MLP; the activations stand in the code, and no attribute holds them.

    Args:
        gate: activation of the gate of each head; None runs no gate.
        act: activation of the MLP's gate.
        fused: the gate is the second half of what the projection of q gives a head.
        late: the gate stands behind o_proj.
        unused: the gate's projection runs all the same.
    """

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj = nn.Linear(WIDTH, 2 * WIDTH if fused else WIDTH)
            self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.g_proj = nn.Linear(WIDTH, WIDTH if late else HEADS)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (part(x).unflatten(-1, (HEADS, -1)) for part in (self.q_proj, self.k_proj, self.v_proj))
            q, of_q = q.chunk(2, -1) if fused else (q, None)
            y = functional.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v)), is_causal=True)
            y = y.transpose(1, 2)
            if unused:
                self.g_proj(x)
            if gate is not None and not late:
                y = y * gate(self.g_proj(x)[..., None] if of_q is None else of_q)
            z: Tensor = self.o_proj(y.flatten(2))
            return z * gate(self.g_proj(x)) if gate is not None and late else z

    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            z: Tensor = self.down(act(self.gate(x)) * self.up(x))
            return z

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.mlp = nn.ModuleList(Gated() for _ in range(2)), Mlp()

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = x + block(x)
            return x + self.mlp(x)

    torch.manual_seed(2)
    return Model().eval()


def first(a: nn.Module, b: nn.Module) -> str:
    x = torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    report = sqrtdk.diff(a, b, (x,))
    assert report.same is False
    return report.outputs_from


SIGMOID, SILU = torch.sigmoid, functional.silu
CASES = {
    "not run": (
        lambda: model(SIGMOID),
        lambda: model(None),
        "the gate `g_proj` does not run in B; the same holds for blocks.1",
    ),
    "another": (lambda: model(SIGMOID), lambda: model(SILU), "the gate `g_proj` has silu in B, sigmoid in A"),
    "added": (lambda: model(None), lambda: model(SIGMOID), "the gate `g_proj` runs in B, and A has none"),
    "of q": (
        lambda: model(SIGMOID, fused=True),
        lambda: model(SILU, fused=True),
        "the gate `q_proj` has silu in B, sigmoid in A",
    ),
    "late": (lambda: model(SIGMOID, late=True), lambda: model(None, late=True), "the gate `g_proj` does not run in B"),
    "of an MLP": (
        lambda: model(SIGMOID),
        lambda: model(SIGMOID, functional.gelu),
        "the gate `gate` has gelu in B, silu in A",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_gate_is_named(name: str) -> None:
    a, b, says = CASES[name]
    assert says in first(a(), b())


def test_a_gate_that_runs_and_is_not_used_is_none() -> None:
    text = first(model(SIGMOID), model(None, unused=True))
    assert "the gate `g_proj` does not run in B: its output is not used" in text


def test_another_weight_is_not_called_a_gate() -> None:
    a, b = model(SIGMOID), model(SIGMOID)
    nn.init.normal_(b.get_submodule("blocks.0.o_proj").weight)
    assert "gate" not in first(a, b)


@pytest.mark.parametrize("name", GATE_ACTIVATIONS)
def test_each_activation_is_read_off_the_numbers(name: str) -> None:
    draw = torch.Generator().manual_seed(1)
    up, gate = (torch.randn(2, ROWS, WIDTH, generator=draw, dtype=torch.float64) for _ in range(2))
    found = gate_of(Numbers([("gate", gate), ("up", up)], up * GATE_ACTIVATIONS[name](gate)))
    assert found is not None
    assert found == Gate("gate", name, "up") if name != NO_ACTIVATION else found.activation == NO_ACTIVATION


def test_a_gate_is_named_beside_an_attention_with_a_cause() -> None:
    """The attention's own cause explains a part: what gets B's input is behind the gate."""

    def scaled(gate: Activation | None) -> nn.Module:
        other = model(gate)
        for block in other.get_submodule("blocks").children():
            for parameter in block.get_submodule("q_proj").parameters():
                parameter.data.mul_(0.5)
        return other

    x = torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    said = " ".join(map(str, sqrtdk.diff(model(SIGMOID), scaled(None), (x,)).paragraphs))
    assert "explain all of it" not in said
    assert "`blocks.0`: the gate `g_proj` does not run in B. The same holds for blocks.1." in said
    assert "explain all of it" in " ".join(map(str, sqrtdk.diff(model(SIGMOID), scaled(SIGMOID), (x,)).paragraphs))


def test_an_output_that_could_not_be_arranged_by_heads_has_no_gate_by_heads() -> None:
    inner = [("g_proj", torch.rand(1, 3, 4)), ("o_proj", torch.rand(1, 3, 8))]
    assert gate_of(Numbers(inner, torch.rand(1, 3, 8), torch.empty(0))) is None

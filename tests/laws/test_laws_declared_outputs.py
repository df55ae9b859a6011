"""Law `configured`: the factor on v and the gate on the output are held against the config."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F

from sqrtdk.audit.declared import config_at
from sqrtdk.audit.declared_outputs import ACTIVATION_NAMES, OUTPUT_FIELDS
from sqrtdk.audit.records import BROKEN, KEPT, NOT_ASKED
from sqrtdk.laws.ask import ask
from sqrtdk.tracing.probe.gates import GATE_ACTIVATIONS, multiple_of

WIDTH, HEADS = 32, 4
Act = Callable[[Tensor], Tensor]


class Attention(nn.Module):
    """An attention with a factor on v, on the output, or behind `o_proj`, and a gate for each head.

    Args:
        scales: factors on v, on the output, and behind `o_proj`.
        gate: activation of the gate in front of `o_proj`.
        late: activation of a gate behind it.
        fused: the gate is a half of what `q_proj` gives.
    """

    def __init__(
        self, scales: tuple[float, float, float] = (1, 1, 1), gate: Act | None = None, late: Act | None = None,
        fused: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, 2 * WIDTH if fused else WIDTH)
        self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.g_proj, self.drop = nn.Linear(WIDTH, WIDTH if late else HEADS), nn.Dropout(0.1)
        self.scales, self.gate, self.late, self.fused = scales, gate, late, fused

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (HEADS, -1)) for part in (self.q_proj, self.k_proj, self.v_proj))
        q, of_q = q.chunk(2, -1) if self.fused else (q, None)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v * self.scales[0]))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2) * self.scales[1]
        if self.gate is not None:
            y = y * self.gate(self.g_proj(x)[..., None] if of_q is None else of_q)
        z: Tensor = self.drop(self.o_proj(y.flatten(2))) * self.scales[2]
        return z if self.late is None else z * self.late(self.g_proj(x))


class Model(nn.Module):
    def __init__(self, attention: nn.Module, **config: Any) -> None:
        super().__init__()
        self.config, self.attn = SimpleNamespace(**config), attention

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(x)


def answer_of(model: nn.Module, about: str, inputs: Any = None) -> tuple[str, str]:
    """Return the state of the law about a field, and what it says."""
    inputs = torch.randn(2, 12, WIDTH) if inputs is None else inputs
    answers = ask(model.eval(), inputs, "configured").answers
    told = [answer for answer in answers if str(answer.about) == about]
    assert all((answer.finding is not None) == (answer.state == BROKEN) for answer in told)
    return (str(told[0].state), str(told[0].reason)) if told else ("", "")


@pytest.mark.parametrize("scales", [(0.5, 1, 1), (1, 0.5, 1), (1, 1, 0.5), (0.25, 2, 1)])
def test_a_factor_on_v_counts_wherever_it_stands(scales: tuple[float, float, float]) -> None:
    assert answer_of(Model(Attention(scales), attention_value_scale=0.5), "factor on v") == (KEPT, "")
    other = answer_of(Model(Attention(scales), attention_value_scale=0.707), "factor on v")
    if scales[2] == 1:
        assert other == (BROKEN, "v is multiplied by 0.5, config.attention_value_scale = 0.707")
    else:  # a number behind the projection may be a residual multiplier
        assert other[0] == NOT_ASKED


class Free(Attention):
    """An attention whose code behind its heads is given: `then(self, heads, x)`."""

    def __init__(self, then: Callable[..., Tensor], on_v: float = 1.0) -> None:
        super().__init__((on_v, 1, 1), late=torch.sigmoid)
        self.then, self.norm, self.gated, self.alpha = (
            then,
            nn.LayerNorm(WIDTH),
            GateModule(),
            nn.Parameter(torch.ones(1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (HEADS, -1)) for part in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v * self.scales[0]))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.then(self, y, x)


class GateModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        return y * torch.sigmoid(self.proj(x))


class Around(nn.Module):
    """A module that multiplies what leaves an attention: by a gate of its own, or by tanh of a number."""

    def __init__(self, attention: nn.Module, how: str) -> None:
        super().__init__()
        self.a, self.gate, self.norm, self.how = attention, nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH), how

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.a(x)
        if self.how == "norm":
            return x + self.norm(y)
        gate = {"gate": torch.sigmoid(self.gate(x)), "tanh": torch.tanh(self.gate.bias[0]), "": 1.0}[self.how]
        return y * gate


RIGHT_GATES: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "behind a dropout": lambda a, y, x: a.o_proj(a.drop(y) * F.silu(a.g_proj(x))),
    "behind a norm": lambda a, y, x: a.o_proj(a.norm(y) * F.silu(a.g_proj(x))),
    "a module": lambda a, y, x: a.o_proj(a.gated(y, x)),
    "a number": lambda a, y, x: a.o_proj(y) * torch.tanh(a.alpha),
}


@pytest.mark.parametrize("where", RIGHT_GATES)
def test_a_gate_that_runs_is_never_missing(where: str) -> None:
    model = Model(Free(RIGHT_GATES[where]), attn_output_gate=True)
    assert answer_of(model, "gate")[0] == (KEPT if where in ("behind a dropout", "a module") else NOT_ASKED)
    # nor is it overlooked where the config says that there is none
    model = Model(Free(RIGHT_GATES[where]), attn_output_gate=False)
    assert answer_of(model, "gate")[0] in ((BROKEN,) if where == "behind a dropout" else (BROKEN, NOT_ASKED))


@pytest.mark.parametrize(("how", "state"), [("gate", NOT_ASKED), ("tanh", NOT_ASKED), ("", BROKEN), ("norm", BROKEN)])
def test_what_a_module_around_multiplies_may_be_the_gate(how: str, state: str) -> None:
    model = Model(Around(Attention(), how), attn_output_gate=True)
    assert answer_of(model, "gate")[0] == state
    model = Model(Around(Attention(), how), attn_output_gate=False)
    assert answer_of(model, "gate")[0] == (KEPT if state == BROKEN else NOT_ASKED)
    model = Model(Around(Attention(), how), attention_value_scale=0.5)
    assert answer_of(model, "factor on v")[0] == state


def test_a_norm_of_the_output_is_not_its_projection() -> None:
    normed = Free(lambda a, y, x: a.o_proj(a.norm(y)))
    assert answer_of(Model(normed, attn_output_gate=True), "gate")[0] == NOT_ASKED


def test_a_projection_of_zeros_shows_no_gate_behind_it() -> None:
    attention = Attention(late=torch.sigmoid)
    for parameter in attention.o_proj.parameters():
        nn.init.zeros_(parameter)
    assert answer_of(Model(attention, attn_output_gate=True), "gate")[0] == NOT_ASKED


def test_a_mode_without_a_name_states_nothing() -> None:
    assert answer_of(Model(Attention(), gate_attn_act_mode=""), "gate") == ("", "")


def test_a_residual_multiplier_is_no_factor_on_v() -> None:
    for late in (0.22, 0.1):
        assert answer_of(Model(Attention((0.5, 1, late)), attention_value_scale=0.5), "factor on v") == (KEPT, "")
    twice = Free(lambda a, y, x: a.o_proj(0.5 * y * torch.sigmoid(a.g_proj(x))), on_v=0.5)
    assert answer_of(Model(twice, attention_value_scale=0.5), "factor on v")[0] == NOT_ASKED


def test_a_config_of_gates_hides_no_scale() -> None:
    model = Model(Attention(), attention_multiplier=0.25, attn_output_gate=False)
    model.attn.config = SimpleNamespace(use_attention_gate=True)  # type: ignore[assignment]
    assert config_at(model, "attn") is model.config
    assert config_at(model, "attn", OUTPUT_FIELDS) is model.attn.config
    assert answer_of(model, "gate") == (BROKEN, "the output has no gate, config.use_attention_gate = True")
    model.attn.config = SimpleNamespace(softmax_scale=0.25)  # type: ignore[assignment]
    assert config_at(model, "attn", OUTPUT_FIELDS) is model.config


def test_a_factor_on_v_that_is_ignored_or_applied_twice_is_found() -> None:
    for scales, factor in (((1, 1, 1), "1"), ((0.707, 0.707, 1), "0.4998")):
        state, text = answer_of(Model(Attention(scales), attention_value_scale=0.707), "factor on v")
        assert (state, text) == (BROKEN, f"v is multiplied by {factor}, config.attention_value_scale = 0.707")


def test_a_factor_beside_a_gate_is_read_only_where_the_gate_is() -> None:
    gated = Attention((0.5, 1, 1), torch.sigmoid)
    assert answer_of(Model(gated, attention_value_scale=0.5), "factor on v")[0] == KEPT
    assert answer_of(Model(gated, attention_value_scale=1.0), "factor on v")[0] == BROKEN
    # a product of a gate that is not read may hold the factor
    unread = Attention((1, 1, 1), lambda g: 0.5 * torch.sigmoid(g).square())
    assert answer_of(Model(unread, attention_value_scale=0.5), "factor on v")[0] == NOT_ASKED


def test_a_config_without_these_fields_is_not_asked() -> None:
    assert answer_of(Model(Attention((0.5, 1, 1), torch.sigmoid), hidden_size=WIDTH), "factor on v") == ("", "")
    assert answer_of(Model(Attention(), attention_value_scale=None), "factor on v") == ("", "")
    # Qwen4's gate of its linear attention: that of its softmax attention is another
    assert "output_gate_type" not in OUTPUT_FIELDS


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mode", ACTIVATION_NAMES)
def test_the_gate_of_each_mode_is_kept_and_another_is_found(mode: str) -> None:
    run, name = GATE_ACTIVATIONS[ACTIVATION_NAMES[mode]], "g_proj"
    assert answer_of(Model(Attention(gate=run), gate_attn_act_mode=mode), "gate") == (KEPT, "")
    other = "silu" if mode == "sigmoid" else "sigmoid"
    state, text = answer_of(Model(Attention(gate=GATE_ACTIVATIONS[other]), gate_attn_act_mode=mode), "gate")
    expected = KEPT if ACTIVATION_NAMES[mode] == other else BROKEN
    assert state == expected
    assert state == KEPT or text == f"the gate `{name}` has {other}, config.gate_attn_act_mode = {mode}"


@pytest.mark.parametrize("where", ["front", "late", "fused"])
def test_a_gate_is_read_where_it_stands(where: str) -> None:
    def model(act: Act, mode: str) -> Model:
        attention = Attention(late=act) if where == "late" else Attention(gate=act, fused=where == "fused")
        return Model(attention, gate_attn_act_mode=mode, headwise_attn_output_gate=True)

    assert answer_of(model(torch.sigmoid, "sigmoid"), "gate") == (KEPT, "")
    name = "q_proj" if where == "fused" else "g_proj"
    says = f"the gate `{name}` has sigmoid, config.gate_attn_act_mode = silu"
    assert answer_of(model(torch.sigmoid, "silu"), "gate") == (BROKEN, says)


@pytest.mark.parametrize(
    ("gate", "config", "state", "says"),
    [
        (None, {"attn_output_gate": True}, BROKEN, "the output has no gate, config.attn_output_gate = True"),
        (None, {"gate_attn_act_mode": "silu"}, BROKEN, "the output has no gate, config.gate_attn_act_mode = silu"),
        (None, {"attn_output_gate": False, "gate_attn_act_mode": "silu"}, KEPT, ""),
        (torch.sigmoid, {"headwise_attn_output_gate": False, "elementwise_attn_output_gate": True}, KEPT, ""),
        (
            torch.sigmoid,
            {"use_attention_gate": False},
            BROKEN,
            "the output has the gate `g_proj` with sigmoid, config.use_attention_gate = False",
        ),
        (torch.sigmoid, {"gate_attn_act_mode": "mish"}, NOT_ASKED, None),
        (lambda g: torch.sigmoid(g) ** 2, {"gate_attn_act_mode": "sigmoid"}, NOT_ASKED, None),
    ],
)
def test_a_gate_that_is_declared_runs_and_no_other(
    gate: Act | None, config: dict[str, Any], state: str, says: str | None
) -> None:
    found = answer_of(Model(Attention(gate=gate), **config), "gate")
    assert found[0] == state
    assert says is None or found[1] == says


def test_a_constant_gate_is_not_told_from_others() -> None:
    """Of zero weights: 2 * sigmoid is 1, as without a gate; silu and tanh are 0."""
    for act, mode in ((F.silu, "tanh"), (torch.tanh, "silu")):
        attention = Attention(gate=act)
        for parameter in attention.g_proj.parameters():
            nn.init.zeros_(parameter)
        assert answer_of(Model(attention, gate_attn_act_mode=mode), "gate")[0] == KEPT


def test_an_attention_in_a_module_of_its_own_is_read_with_the_modules_beside_it() -> None:
    class Core(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.core, self.o_proj = nn.Linear(WIDTH, 3 * WIDTH), Core(), nn.Linear(WIDTH, WIDTH)
            self.g_proj = nn.Linear(WIDTH, HEADS)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            y = self.core(q, k, v) * torch.sigmoid(self.g_proj(x))[..., None]
            z: Tensor = self.o_proj(y.flatten(2))
            return z

    assert answer_of(Model(Block(), gate_attn_act_mode="silu"), "gate") == (
        BROKEN,
        "the gate `g_proj` has sigmoid, config.gate_attn_act_mode = silu",
    )
    assert answer_of(Model(Block(), gate_attn_act_mode="sigmoid"), "gate") == (KEPT, "")


def mimo(factor: float | None = 0.707) -> nn.Module:
    config = hf.MiMoV2FlashConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=12, v_head_dim=8, layer_types=["full_attention", "sliding_attention"],
        mlp_layer_types=["dense", "dense"], sliding_window=4, attention_value_scale=factor,
    )  # fmt: skip
    model = hf.MiMoV2FlashForCausalLM(config)
    nn.init.zeros_(model.get_parameter("model.layers.1.self_attn.sinks"))
    return model


def lfm3(gate: bool = True) -> nn.Module:
    config = hf.Lfm3Config(
        pad_token_id=0, vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, layer_types=["full_attention"], use_attention_gate=gate,
    )  # fmt: skip
    return hf.Lfm3ForCausalLM(config)


IDS = {"input_ids": torch.arange(24).view(2, 12)}


@pytest.mark.full
def test_a_real_model_with_a_factor_on_v() -> None:
    assert answer_of(mimo(), "factor on v", IDS) == (KEPT, "")
    assert answer_of(mimo(None), "factor on v", IDS) == ("", "")
    broken = mimo()
    for layer in broken.get_submodule("model.layers").children():
        layer.get_submodule("self_attn").v_scale = 1.0
    says = "v is multiplied by 1, config.attention_value_scale = 0.707"
    assert answer_of(broken, "factor on v", IDS) == (BROKEN, says)


@pytest.mark.full
def test_a_real_model_with_a_gate() -> None:
    assert answer_of(lfm3(), "gate", IDS) == (KEPT, "")
    assert answer_of(lfm3(False), "gate", IDS) == (KEPT, "")
    broken = lfm3()
    for layer in broken.get_submodule("model.layers").children():
        layer.get_submodule("self_attn").g_proj = None
    assert answer_of(broken, "gate", IDS) == (
        BROKEN,
        "the output has no gate, config.use_attention_gate = True",
    )


def test_a_number_that_multiplies_a_tensor() -> None:
    x = torch.randn(3, 4)
    assert multiple_of(x * -0.25, x) == pytest.approx(-0.25)
    assert multiple_of(x.square(), x) is None
    assert multiple_of(x[:2], x) is None
    assert multiple_of(x / 0, x) is None

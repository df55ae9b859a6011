"""The factor on v and the gate on an attention's output that a config declares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqrtdk.audit.configs import field, number_at
from sqrtdk.tracing.probe.gates import NO_ACTIVATION

VALUE_SCALES = ("attention_value_scale",)  # MiMo-V2
GATE_MODES = ("gate_attn_act_mode",)  # names an activation: Spark 2.5
GATE_SWITCHES = (  # True: each attention has a gate. Spark 2.5 and Qwen's gated attention; Qwen3-Next; LFM3
    "headwise_attn_output_gate", "elementwise_attn_output_gate", "attn_output_gate", "use_attention_gate",
)  # fmt: skip
OUTPUT_FIELDS = (*VALUE_SCALES, *GATE_MODES, *GATE_SWITCHES)
ACTIVATION_NAMES = {  # name in a config -> name of `GATE_ACTIVATIONS`
    "sigmoid": "sigmoid", "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu (tanh)",
    "gelu_pytorch_tanh": "gelu (tanh)", "tanh": "tanh", "relu": "relu", "relu2": "relu squared",
    "softplus": "softplus", "quick_gelu": "x * sigmoid(1.702 * x)", "linear": NO_ACTIVATION, "identity": NO_ACTIVATION,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class DeclaredGate:
    """What a config says about the gate on an attention's output.

    Attributes:
        by: the field with its value, "config.gate_attn_act_mode = silu".
        gated: whether there is a gate.
        mode: the activation as the config names it; "" if it names none.
    """

    by: str
    gated: bool
    mode: str = ""

    @property
    def activation(self) -> str | None:
        """A name of `GATE_ACTIVATIONS`; None if the config names none, or one that is not known."""
        return ACTIVATION_NAMES.get(self.mode)


def declared_gate(config: Any) -> DeclaredGate | None:
    """Return what a config says about the gate on an attention's output, or None.

    >>> declared_gate({"headwise_attn_output_gate": True, "gate_attn_act_mode": "silu"}).by
    'config.gate_attn_act_mode = silu'
    """
    switches = {name: value for name in GATE_SWITCHES if isinstance(value := field(config, name), bool)}
    if switches and not any(switches.values()):
        return DeclaredGate(f"config.{next(iter(switches))} = False", gated=False)
    for name in GATE_MODES:
        if isinstance(mode := field(config, name), str) and mode:
            return DeclaredGate(f"config.{name} = {mode}", gated=True, mode=mode)
    on = next((name for name, value in switches.items() if value), None)
    return None if on is None else DeclaredGate(f"config.{on} = True", gated=True)


def declared_value_scale(config: Any) -> tuple[str, float] | None:
    """Return the factor on v that a config declares, with its field, or None.

    >>> declared_value_scale({"attention_value_scale": 0.707})
    ('config.attention_value_scale = 0.707', 0.707)
    """
    for name in VALUE_SCALES:
        if (value := number_at(config, name)) is not None:
            return f"config.{name} = {value:g}", value
    return None

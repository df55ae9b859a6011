"""Causes outside attention: each row of the table is found in a planted pair, with both values and its fix."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from sqrtdk.compare.causes import MODULE_CAUSE_ROWS
from sqrtdk.compare.diff import diff
from sqrtdk.compare.records import ModuleCause
from sqrtdk.report.diff.json import to_json
from tests.compare.decoders import (
    IDS,
    WIDTH,
    Decoder,
    adapted,
    changed,
    decoder,
    doubled_head,
    other_activation,
    other_embedding,
    other_norm,
)
from tests.compare.test_chain import Product, forward_of, put, without_bias
from tests.compare.test_gates import model as gated

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "diff.schema.json").read_text())
Value = str | float | None
Change = Callable[[Decoder], None]
Models = Callable[[], tuple[nn.Module, nn.Module, Any]]


@torch.no_grad()
def tied(model: Decoder) -> None:
    model.head.weight.copy_(model.embed.weight)


@torch.no_grad()
def exchanged_norms(model: Decoder) -> None:
    for number, name in enumerate(("layers.1.norm2", "norm")):
        model.get_submodule(name).weight.copy_(torch.linspace(1, 2 + number, WIDTH))  # type: ignore[operator,union-attr]


@torch.no_grad()
def exchanged_back(model: Decoder) -> None:
    for number, name in enumerate(("norm", "layers.1.norm2")):
        model.get_submodule(name).weight.copy_(torch.linspace(1, 2 + number, WIDTH))  # type: ignore[operator,union-attr]


def padded_embedding(model: Decoder) -> None:
    rows = torch.cat((2 * model.embed.weight.detach(), torch.zeros(2, WIDTH)))
    model.embed = nn.Embedding.from_pretrained(rows)


def square(model: Decoder) -> None:
    torch.manual_seed(1)
    model.layers[0].mlp[2] = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))  # type: ignore[union-attr,index,operator]


@torch.no_grad()
def transposed(model: Decoder) -> None:
    square(model)
    weight = model.get_parameter("layers.0.mlp.2.1.weight")
    weight.copy_(weight.mT.clone())


@torch.no_grad()
def rounded_head(model: Decoder) -> None:
    model.head.weight.copy_(model.head.weight.bfloat16().float())


@torch.no_grad()
def other_numbers(model: Decoder) -> None:
    model.norm.bias[:2] += 1


@torch.no_grad()
def shuffled_head(model: Decoder) -> None:
    model.head.weight.copy_(model.head.weight.flip(0))


@torch.no_grad()
def other_head(model: Decoder) -> None:
    model.head.weight.mul_(torch.linspace(0.5, 2, WIDTH))


class Gain(nn.Module):
    """A factor that only one side holds as a buffer."""

    factor: Tensor | None

    def __init__(self, factor: float | None) -> None:
        super().__init__()
        self.register_buffer("factor", None if factor is None else torch.tensor([factor]))

    def forward(self, x: Tensor) -> Tensor:
        return x if self.factor is None else x * self.factor


class Shaped(nn.Module):
    """A function that it holds as an attribute, of numbers that it holds in its config."""

    def __init__(self, **held: Any) -> None:
        super().__init__()
        self.held = held
        self.config = nn.Module()
        for name, value in held.items():
            setattr(self if callable(value) else self.config, name, value)

    def forward(self, x: Tensor) -> Tensor:
        act = getattr(self, "act", lambda x: x)
        cap, factor = (getattr(self.config, name, None) for name in ("final_logit_softcapping", "logits_scaling"))
        x = act(x) / (factor or 1.0) + getattr(self.config, "shift", 0.0)
        return x if cap is None else cap * torch.tanh(x / cap)


class Offset(nn.RMSNorm):
    """Gemma's norm: its weight counts from 1."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.normalized_shape, 1 + self.weight, self.eps)


def norm_of(cls: type[nn.RMSNorm], plus: float = 0.0) -> Change:
    def make(_: nn.Module) -> nn.Module:
        norm = cls(WIDTH, 1e-6)
        norm.weight.data = torch.linspace(-0.3, 0.5, WIDTH) + plus
        return norm

    return put("norm2", make)


class Glu(nn.Module):
    """A gated MLP; `of` is the projection that the activation follows."""

    def __init__(self, of: str) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self._of = of

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate(x), self.up(x)
        z: Tensor = self.down(functional.silu(gate) * up if self._of == "gate" else gate * functional.silu(up))
        return z


def glu(of: str) -> Change:
    return put("mlp", lambda _: Glu(of))


def shaped(**held: Any) -> Change:
    return put("mlp.1", lambda _: Shaped(**held))


def held(name: str) -> Callable[[Decoder], None]:
    return put("norm2", lambda _: {"RMSNorm": nn.RMSNorm, "LayerNorm": nn.LayerNorm}[name](WIDTH))


def residual(layer: Any, x: Tensor) -> Tensor:
    y: Tensor = layer.attend(layer.norm1(x))
    return y + layer.mlp(layer.norm2(y))


def half(layer: Any, x: Tensor) -> Tensor:
    y: Tensor = 0.5 * x + layer.attend(layer.norm1(x))
    return y + layer.mlp(layer.norm2(y))


def doubled(layer: Any, x: Tensor) -> Tensor:
    y: Tensor = x + layer.attend(layer.norm1(x))
    return 2 * (y + layer.mlp(layer.norm2(y)))


def turned(layer: Any, x: Tensor) -> Tensor:
    y: Tensor = x + layer.attend(layer.norm1(x))
    return y + layer.mlp(layer.norm2(y.transpose(0, 1).reshape_as(y)))


def cut(layer: Any, x: Tensor) -> Tensor:
    y: Tensor = x + layer.attend(layer.norm1(x))
    return y + layer.mlp(layer.norm2(y)[..., :1].expand_as(y)[:, :1]).expand_as(y)


def unknown(layer: Any, x: Tensor) -> Tensor:
    y: Tensor = x + layer.attend(layer.norm1(x))
    return y + functional.softplus(layer.mlp(layer.norm2(y)))


def pair(b: Change, a: Change | None = None) -> Models:
    return lambda: (changed(a) if a else decoder(), changed(b), IDS)


def gates(a: Any, b: Any) -> Models:
    x = torch.randn(2, 10, 32, generator=torch.Generator().manual_seed(0))
    return lambda: (gated(a), gated(b), (x,))


# name, models, both values (None: any), whether it is proven, and words of the fix
CASES: dict[str, tuple[str, Models, tuple[Value, Value] | None, bool, str]] = {
    "tied head": ("tied_head", pair(tied), ("head", "embed"), True, "tie_word_embeddings=False"),
    "head no longer tied": ("tied_head", pair(lambda _: None, tied), ("embed", None), True, "tie_word_embeddings=True"),
    "norms exchanged": (
        "weights_elsewhere", pair(exchanged_back, exchanged_norms), ("layers.1.norm2", "norm"), True,
        "load A's `weight` into `layers.1.norm2`",
    ),
    "rows flipped": (
        "weights_elsewhere", pair(shuffled_head), ("head.weight", "head.weight"), True, "load A's `weight` into `head`",
    ),
    "another shape": ("weights_shape", pair(padded_embedding), ("(23, 16)", "(25, 16)"), True, ""),
    "scaled": ("weights_scaled", pair(doubled_head), (1.0, 2.0), True, "divide the `weight` of `head` by 2"),
    "transposed": (
        "weights_transposed", pair(transposed, square), ("weight", "weight.mT"), True, "transpose the `weight`",
    ),
    "rounded": (
        "weights_rounded", pair(rounded_head), ("float32", "bfloat16"), True, "in float32, not rounded to bfloat16",
    ),
    "not rounded": (
        "weights_rounded", pair(lambda _: None, rounded_head), ("bfloat16", "float32"), True,
        "round the `weight` of `head` to bfloat16",
    ),
    "few numbers": ("weights", pair(other_numbers), (0.0, 1.0), True, "load A's `bias` into `norm`"),
    "few rows": ("weights", pair(other_embedding), None, True, "load A's `weight` into `embed`"),
    "all numbers": ("weights", pair(other_head), None, True, "load A's `weight` into `head`"),
    "no bias": ("layer_bias", pair(put("mlp.2", without_bias)), ("bias", None), True, "add the `bias` in"),
    "a bias": (
        "layer_bias", pair(lambda _: None, put("mlp.2", without_bias)), (None, "bias"), True, "do not add the `bias`",
    ),
    "no factor": (
        "parameter_missing", pair(put("mlp.1", lambda _: Gain(None)), put("mlp.1", lambda _: Gain(3.0))),
        ("factor", None), True, "give `layers.0.mlp.1` A's `factor`",
    ),
    "eps": ("norm_eps", pair(other_norm), (1e-5, 0.01), True, "set `eps` of `norm` to 1e-05"),
    "approximate": (
        "activation", pair(put("mlp.1", lambda _: nn.GELU("tanh"))), ("none", "tanh"), True,
        "set `approximate` of `layers.0.mlp.1` to none",
    ),
    "act": (
        "activation", pair(shaped(act=functional.relu), shaped(act=functional.gelu)), ("gelu", "relu"), True,
        "set `act` of `layers.0.mlp.1` to gelu",
    ),
    "cap": (
        "logit_cap", pair(shaped(final_logit_softcapping=None), shaped(final_logit_softcapping=0.5)), (0.5, None), True,
        "set `config.final_logit_softcapping` of `layers.0.mlp.1` to 0.5",
    ),
    "multiplier": (
        "multiplier", pair(shaped(logits_scaling=8.0), shaped(logits_scaling=1.0)), (1.0, 8.0), True,
        "set `config.logits_scaling` of `layers.0.mlp.1` to 1",
    ),
    "setting": ("setting", pair(shaped(shift=0.5), shaped(shift=0.25)), (0.25, 0.5), True, "set `config.shift`"),
    "bias not added": ("layer_bias", pair(put("mlp.2", Product)), ("bias", None), True, "add the `bias` in"),
    "bias added": (
        "layer_bias", pair(lambda _: None, put("mlp.2", Product)), (None, "bias"), True, "do not add the `bias`",
    ),
    "another activation": (
        "activation", pair(other_activation), ("GELU", "ReLU"), True, "use GELU for `layers.1.mlp.1`, not ReLU",
    ),
    "no offset": (
        "norm_offset", pair(norm_of(nn.RMSNorm), norm_of(Offset)), ("1 + weight", "weight"), True,
        "multiply by 1 + `weight` in `layers.0.norm2`",
    ),
    "an offset": (
        "norm_offset", pair(norm_of(Offset), norm_of(nn.RMSNorm)), ("weight", "1 + weight"), True,
        "multiply by `weight` in `layers.0.norm2`",
    ),
    "offset added when loading": (
        "norm_offset", pair(norm_of(Offset, 1.0), norm_of(Offset)), ("weight", "weight +1"), True,
        "load A's `weight` into `layers.0.norm2`, without the +1",
    ),
    "another norm": ("norm_kind", pair(held("RMSNorm")), ("LayerNorm", "RMSNorm"), True, "use LayerNorm for"),
    "another class": ("module_class", pair(adapted), ("Linear", "LowRank"), True, "use Linear for"),
    "rows cut": ("output_shape", pair(forward_of(cut)), ("(2, 7, 16)", "(2, 1, 16)"), False, ""),
    "no gate": (
        "gate_missing", gates(torch.sigmoid, None), ("g_proj", None), False,
        "multiply by the output of the gate `g_proj` in `blocks.0`",
    ),
    "a gate": ("gate_missing", gates(None, torch.sigmoid), (None, "g_proj"), False, "take the gate `g_proj` out of"),
    "gate's activation": (
        "gate_activation", gates(torch.sigmoid, functional.silu), ("sigmoid", "silu"), False, "use sigmoid for the",
    ),
    "gate elsewhere": (
        "gate_place", pair(glu(of="up"), glu(of="gate")), ("gate", "up"), False, "from `gate`, not from `up`",
    ),
    "output doubled": ("output_scale", pair(forward_of(doubled)), (1.0, 2.0), False, "computes there by 2"),
    "no residual": ("residual", pair(forward_of(residual)), (1.0, None), False, "add the input of `layers.0` in"),
    "half a residual": ("residual_scale", pair(forward_of(half)), (0.5, None), False, "add 0.5 times the input of"),
    "other order": ("output_order", pair(forward_of(turned)), (None, None), False, ""),
    "unknown": ("unknown", pair(forward_of(unknown)), (None, None), False, ""),
}  # fmt: skip


def first_cause(case: str) -> tuple[ModuleCause, dict[str, Any]]:
    a, b, inputs = CASES[case][1]()
    report = diff(a, b, inputs)
    document = json.loads(to_json(report))
    jsonschema.validate(document, SCHEMA)
    return report.module_causes[0], document["module_causes"][0]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES)
def test_a_cause_has_its_name_both_values_and_what_to_change(case: str) -> None:
    name, _, values, proven, fix = CASES[case]
    cause, written = first_cause(case)
    assert (cause.name, cause.proven) == (name, proven)
    if values is not None:
        assert (cause.a, cause.b) == tuple(pytest.approx(x, rel=1e-5) if isinstance(x, float) else x for x in values)
    else:
        assert isinstance(cause.a, float)
        assert isinstance(cause.b, float)
        assert cause.a != cause.b
    assert fix in (cause.fix or "")
    assert (cause.fix is None) == (fix == "")
    assert written["name"] == name
    assert (written["message_id"] is None) == (name == "unknown")


def test_every_row_of_the_table_has_a_case() -> None:
    assert {row.name for row in MODULE_CAUSE_ROWS} | {"unknown"} == {case[0] for case in CASES.values()}

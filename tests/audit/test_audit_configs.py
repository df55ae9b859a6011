"""Which object is a module's config, of whatever kind and name; what it declares is held against the run."""

import argparse
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional

from sqrtdk._check import check
from sqrtdk.audit.declared import CONFIG_NAMES, config_at
from tests.attentions.each import each
from tests.support.optional import optional

omegaconf = optional("omegaconf")
SCALAR = 21  # of heads of 16: r = 0.873, as Gemma 3 27B has it


class Attention(nn.Module):
    """Attention of 4 heads of 16 whose scale is given."""

    def __init__(self, scale=None, **attributes):
        super().__init__()
        self.qkv = nn.Linear(64, 192)
        self.applied = scale
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 16).permute(2, 0, 3, 1, 4)
        return functional.scaled_dot_product_attention(q, k, v, scale=self.applied).transpose(1, 2).flatten(2)


def verdict(model, **options):
    """Verdict, what declared it, and the rules that found something above a note."""
    report = check(model, (torch.randn(2, 12, 64),), **options)
    (judged,) = report.calls
    return judged.verdict, judged.declared_by, [f.rule for f in report.findings if f.severity != "note"]


@dataclass
class Plain:
    attention_scores_scalar: int | None = SCALAR


@dataclass(frozen=True, slots=True)
class Slots:
    attention_scores_scalar: int | None = SCALAR


class Named(NamedTuple):
    attention_scores_scalar: int = SCALAR


def omega_config():
    """As Hydra gives it: a node whose value refers to one of the root; what the rules read as well is missing."""
    node = {
        "attention_scores_scalar": "${sizes.query}",
        "scale_attn_weights": "???",
        "query_pre_attn_scalar": "${nowhere}",
    }
    return omegaconf.OmegaConf.create({"sizes": {"query": SCALAR}, "model": node})


def pydantic_config():
    base = pytest.importorskip("pydantic").BaseModel
    fields = {"__annotations__": {"attention_scores_scalar": int}, "attention_scores_scalar": SCALAR}
    return type("Model", (base,), fields)()


def transformers_config():
    return pytest.importorskip("transformers").PretrainedConfig(attention_scores_scalar=SCALAR)


KINDS = {
    "dataclass": Plain,
    "slots": Slots,
    "named tuple": Named,
    "dict": lambda: {"attention_scores_scalar": SCALAR},
    "namespace": lambda: argparse.Namespace(attention_scores_scalar=SCALAR),
    "mapping": lambda: MappingProxyType({"attention_scores_scalar": SCALAR}),
    "omegaconf": lambda: omegaconf.OmegaConf.create({"attention_scores_scalar": SCALAR}),
    "omegaconf, nested": lambda: omega_config().model,
    "omegaconf, structured": lambda: omegaconf.OmegaConf.structured(Plain),
    "pydantic": pydantic_config,
    "transformers": transformers_config,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_of_any_kind_declares_and_the_run_has_to_match(kind):
    right = verdict(Attention(SCALAR**-0.5, config=KINDS[kind]()))
    assert right == ("declared", "config.attention_scores_scalar = 21 (litgpt: scale is its inverse root)", [])
    assert verdict(Attention(None, config=KINDS[kind]()))[::2] == ("unexplained", ["declared_vs_actual"])
    assert verdict(Attention(SCALAR**-0.5))[::2] == ("unexplained", ["scale_ledger"])


@each("value", ["???", "${nowhere}"])
def test_a_value_that_omegaconf_does_not_give_declares_nothing(value):
    config = omegaconf.OmegaConf.create({"attention_scores_scalar": value})
    assert verdict(Attention(SCALAR**-0.5, config=config))[::2] == ("unexplained", ["scale_ledger"])
    assert verdict(Attention(config=config))[::2] == ("exact", [])


@pytest.mark.parametrize("name", CONFIG_NAMES)
def test_a_config_of_each_name_declares_on_the_module_and_above_it(name):
    inner = nn.Sequential(Attention(SCALAR**-0.5))
    assert verdict(Attention(SCALAR**-0.5, **{name: Plain()}))[0] == "declared"
    setattr(inner, name, Plain())
    assert verdict(inner)[0] == "declared"
    assert verdict(inner, static=True)[0] == "declared"
    delattr(inner, name)
    inner.settings = Plain()  # no name of a config
    assert verdict(inner)[0] == "unexplained"


@each("value", [None, 0, -21, float("nan"), float("inf"), True, "21", [21], 10**400])
def test_a_value_that_makes_no_sense_declares_nothing(value):
    assert verdict(Attention(None, config=Plain(value))) == ("exact", None, [])
    assert verdict(Attention(SCALAR**-0.5, config=Plain(value)))[::2] == ("unexplained", ["scale_ledger"])


class Raising(float):
    """A number whose own methods raise; what computes with it computes with 21."""

    def __float__(self):
        raise RuntimeError("no number")

    __gt__ = __lt__ = __eq__ = __bool__ = __float__
    __hash__ = float.__hash__


class RaisingInt(int):
    __float__ = __gt__ = __lt__ = __eq__ = __bool__ = __index__ = Raising.__float__
    __hash__ = int.__hash__


@each("kind", [Raising, RaisingInt])
def test_a_number_of_a_class_of_its_own_is_read_by_its_value(kind):
    assert verdict(Attention(SCALAR**-0.5, config=Plain(kind(SCALAR))))[0] == "declared"
    assert verdict(Attention(None, config=Plain(kind(SCALAR))))[::2] == ("unexplained", ["declared_vs_actual"])


def raises(*_):
    raise RuntimeError("not to be read")


def own(kind, value):
    """A value of a class of its own, most of whose methods raise."""
    names = {"__eq__", "__lt__", "__le__", "__gt__", "__bool__", "__len__", "__iter__", "__getitem__", "__contains__"}
    return type("Own", (kind,), dict.fromkeys(names, raises) | {"__hash__": None if kind is list else kind.__hash__})(
        value
    )


OWN = {
    "a switch": {"attn_temperature_tuning": own(float, 1.0), "attn_scale": 0.1, "floor_scale": 8192},
    "a type": {"model_type": own(str, "gpt2")},
    "a kind": {"rope_scaling": {"rope_type": own(str, "linear"), "factor": 8.0}},
    "a list": {"rope_scaling": {"full": {"rope_type": "linear"}}, "layer_types": own(list, ["full"])},
}


@pytest.mark.parametrize("name", OWN)
def test_a_value_of_a_class_of_its_own_is_read_without_its_methods(name):
    assert verdict(Attention(None, config=SimpleNamespace(**OWN[name]))) == ("exact", None, [])


UNREADABLE = [("get",), ("__iter__",), ("get", "values", "__bool__", "__len__")]


@pytest.mark.parametrize("methods", UNREADABLE, ids=str)
@each("name", ["rope_scaling", "rope_parameters", "rope_adjustments"])
def test_a_mapping_that_cannot_be_read_declares_nothing(name, methods):
    odd = type("Odd", (dict,), dict.fromkeys(methods, raises))
    block = odd(factor=40.0, mscale_all_dim=1.0)
    assert verdict(Attention(None, config=SimpleNamespace(**{name: block}))) == ("exact", None, [])
    kinds = SimpleNamespace(layer_types=["full"], **{name: {"full": block}})
    assert verdict(nn.Sequential(Attention(None, config=kinds))) == ("exact", None, [])


def test_the_nearest_config_that_says_something_governs():
    model = nn.Sequential(nn.Sequential(Attention()))
    model.config = {"model_type": "t5"}
    assert config_at(model, "0.0") is model.config
    model[0].args = SimpleNamespace(learning_rate=1e-3, attention_scores_scalar=None)  # no field that declares
    assert config_at(model, "0.0") is model.config
    model[0].cfg = {"attention_scores_scalar": 30}
    assert config_at(model, "0.0") is model[0].cfg
    model[0][0].config = {"scale_attn_weights": True}
    assert config_at(model, "0.0") is model[0][0].config
    assert config_at(model, "0") is model[0].cfg
    assert config_at(model, "") is model.config


def test_without_a_field_of_known_meaning_it_is_the_nearest():
    model = nn.Sequential(Attention(config={"width": 64}))
    model.config = {"depth": 1}
    assert config_at(model, "0") is model[0].config
    assert config_at(nn.Sequential(Attention()), "0") is None


@each("answer", [0.3, True, False, "t5", {"mscale": 2.0}, None])
def test_a_config_that_answers_to_any_name_declares_what_it_holds_and_no_more(answer):
    class Lenient:
        def __getattr__(self, name):
            return answer

    odd = Lenient()
    assert verdict(Attention(None, config=odd)) == ("exact", None, [])
    odd.attention_scores_scalar = SCALAR
    assert verdict(Attention(SCALAR**-0.5, config=odd))[0] == "declared"


def test_a_config_behind_a_property_is_read_and_one_that_raises_is_none():
    class Behind(Attention):
        @property
        def config(self):
            return self._kept if self._kept is not None else 1 / 0

    assert verdict(Behind(SCALAR**-0.5, _kept=Plain()))[0] == "declared"
    assert verdict(Behind(SCALAR**-0.5, _kept=None))[0] == "unexplained"


class LitAttention(nn.Module):
    """As litgpt writes it: the scalar, else the head's size; and the square of YaRN's factor."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.qkv = nn.Linear(64, 192)
        found = config.rope_adjustments or {}
        self.mscale = 0.1 * found.get("mscale_all_dim", 0.0) * torch.tensor(found.get("factor", 1.0)).log().item() + 1.0

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 16).permute(2, 0, 3, 1, 4)
        scale = (self.config.attention_scores_scalar or 16) ** -0.5 * self.mscale**2
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)


@each("scalar", [None, SCALAR])
@each("block", [None, {"factor": 40.0, "mscale_all_dim": 1.0}, {"factor": 8.0, "low_freq_factor": 1}])
def test_litgpt_is_right_and_its_config_is_held_against_the_run(scalar, block):
    config = SimpleNamespace(attention_scores_scalar=scalar, rope_adjustments=block)
    model = LitAttention(config)
    told = verdict(model)
    assert told[0] == ("exact" if scalar is None and (block is None or "mscale_all_dim" not in block) else "declared")
    assert told[2] == []
    model.mscale *= 1.1
    assert verdict(model)[0] == "unexplained"

"""Numbers, texts and functions that two modules or their configs hold and that differ: an eps, an activation, a cap."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

from torch import nn

from sqrtdk._wrappers import submodule
from sqrtdk.compare.numbers import unequal_texts
from sqrtdk.compare.outside.parts import (
    EPS_NAMES,
    HeldValue,
    ModuleDifference,
    ModulePair,
    ValuePair,
    is_activation_name,
)

OTHER_FUNCTION, OTHER_NAME = "outputs.module.other_function", "outputs.module.other_value_of"
_MOST_SHOWN_CHARACTERS = 60  # characters of a text that are shown
_CAP = re.compile(r"cap(ping)?$")  # config.final_logit_softcapping
_MULTIPLIER = re.compile(r"multiplier|scal(e|ing)|factor|alpha")  # config.logits_scaling, self.residual_multiplier


def differing_values(modules: ModulePair) -> Iterator[ValuePair]:
    """Yield the attributes that both modules have and whose values differ; then those of their `config`.

    Compared are public attributes that are None, a boolean, number, text or function. An eps may have another of its
    usual names on B's side.
    """
    a, b = modules.a, modules.b
    for holder, one, other in (("", a, b), ("config", getattr(a, "config", None), getattr(b, "config", None))):
        values, others = _held_values(one), _held_values(other)
        for name, value in values.items():
            renamed = next((eps for eps in EPS_NAMES if name in EPS_NAMES and eps in others), None)
            partner = name if name in others else renamed
            if partner is not None and not _alike(value, others[partner]):
                yield ValuePair(modules, holder, name, partner, value, others[partner])


# -- rows of the table -------------------------------------------------------------------------------------------------


def compare_norm_eps(part: ValuePair) -> ModuleDifference | None:
    """Return the difference if the attribute is the eps of a norm, by its name; else None."""
    return compare_setting(part) if part.name in EPS_NAMES else None


def compare_activation_setting(part: ValuePair) -> ModuleDifference | None:
    """Return the difference if the attribute names or is an activation; else None.

    Examples are `hidden_act="silu"`, a function `act_fn`, and `approximate="tanh"` of a GELU.
    """
    of_module = part.modules.kind == "activation" and isinstance(part.a, str)
    named = isinstance(part.a, str) and is_activation_name(part.name)
    called = callable(part.a) and any(is_activation_name(_text(x)) for x in (part.a, part.b))
    return compare_setting(part) if of_module or named or called else None


def compare_cap(part: ValuePair) -> ModuleDifference | None:
    """Return the difference if the attribute is a number named as a cap, `final_logit_softcapping`; else None."""
    return compare_setting(part) if _CAP.search(part.name) and _is_number(part) else None


def compare_multiplier(part: ValuePair) -> ModuleDifference | None:
    """Return the difference if the attribute is a number named as a factor, `logits_scaling`; else None."""
    return compare_setting(part) if _MULTIPLIER.search(part.name) and _is_number(part) else None


def compare_setting(part: ValuePair) -> ModuleDifference:
    """Return the difference of an attribute's values, whatever it is.

    `a` and `b` are numbers or None as they are, other values as text, cut to 60 characters about where they differ.
    """
    prefix = f"{part.holder}." if part.holder else ""
    own, its = f"`{prefix}{part.name}`", f"`{prefix}{part.name_b}`"
    one, other = _shown(part.a, part.b)
    words = {"name": own, "one": one, "partner": its, "other": other}
    text = OTHER_FUNCTION if one == other else "" if part.name == part.name_b else OTHER_NAME
    a, b = _recorded(part.a, one), _recorded(part.b, other)
    return ModuleDifference(a, b, words, partial(_set, part), text)


def _is_number(part: ValuePair) -> bool:
    return any(isinstance(x, int | float) and not isinstance(x, bool) for x in (part.a, part.b))


def _held_values(holder: object) -> dict[str, HeldValue]:
    fields = getattr(holder, "__dict__", {})
    return {
        name: x
        for name, x in fields.items()
        # layer_idx differs between the layers of one model, and says nothing about what they compute
        if not name.startswith("_") and name not in ("training", "layer_idx")
        if x is None or isinstance(x, bool | int | float | str) or (callable(x) and hasattr(x, "__qualname__"))
    }


def _alike(a: HeldValue, b: HeldValue) -> bool:
    """Return whether two values are equal; functions are equal if they have the same code."""
    if callable(a) and callable(b):
        return getattr(a, "__code__", a) == getattr(b, "__code__", b)
    # True == 1 in Python, but `bias=True` and `bias=1` are not the same field
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def _shown(a: HeldValue, b: HeldValue) -> tuple[str, str]:
    """Return two values as text that shows where they differ; untrusted text may be of any length, so it is cut."""
    if type(a) in (int, float) and type(b) in (int, float):
        return unequal_texts(float(a), float(b))  # type: ignore[arg-type]
    texts = [_text(value) for value in (a, b)]
    apart = next((i for i, (x, y) in enumerate(zip(*texts, strict=False)) if x != y), 0)
    start = max(0, apart - _MOST_SHOWN_CHARACTERS // 2)
    cut = [f"{'...' if start else ''}{text[start:][:_MOST_SHOWN_CHARACTERS]}..." for text in texts]
    one, other = (text if len(text) <= _MOST_SHOWN_CHARACTERS else part for text, part in zip(texts, cut, strict=True))
    return one, other


def _text(value: HeldValue) -> str:
    return str(getattr(value, "__name__", value))


def _recorded(value: HeldValue, shown: str) -> str | float | None:
    """Return a value as the record has it: numbers and None as they are, everything else as the text that is shown."""
    return value if value is None or type(value) in (int, float) else shown  # type: ignore[return-value]


def _set(part: ValuePair, model: nn.Module, path: str) -> None:
    """Set B's value in a module of a copy of A, under A's name."""
    module = submodule(model, path)
    setattr(getattr(module, part.holder) if part.holder else module, part.name, part.b)

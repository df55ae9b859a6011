"""The page's controls, and their values read from typed text or the page's address."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from urllib.parse import urlencode

from sqrtdk.errors import InvalidValueError
from sqrtdk.extending import Language
from sqrtdk.messages import Message, word
from sqrtdk.scales import SCALES, ScaleRule

LONGEST_VALUE = 40  # characters of a value; no number needs more


@dataclass(frozen=True, slots=True)
class Control:
    """One control of the page.

    Attributes:
        default: initial value, as text like all values of the page.
        offered: the steps of its slider, which takes other numbers as well; or the entries of its list.
        low: least number of a slider; None: a list, and only its entries are allowed.
        high: largest number.
        whole: whether only whole numbers are allowed.
        none: whether "none" is allowed too.
    """

    default: str
    offered: tuple[str, ...]
    low: float | None = None
    high: float = math.inf
    whole: bool = False
    none: bool = False


CONTROL_BY_RULE: Mapping[str, Control | None] = {  # name in `sqrtdk.scales.SCALES` -> control of its parameter
    "sqrt_dk": None,
    "none": None,
    "dk": Control("1", ("0.25", "0.5", "1", "2", "4", "8", "16", "32", "64"), 1e-3, 1e4),
    "two_sqrt_dk": None,
    "fixed": Control("0.125", ("0.015625", "0.03125", "0.0625", "0.125", "0.25", "0.5", "1", "2", "4"), -100.0, 100.0),
    "log_n": Control(
        "0.5", ("0.1", "0.168", "0.2", "0.25", "0.3", "0.4", "0.5", "0.7", "1", "1.5", "2"), -100.0, 100.0
    ),
    "yarn": Control("1.3689", ("1", "1.0693", "1.1386", "1.2079", "1.2773", "1.3689", "1.5", "2"), 1e-3, 100.0),
    "disentangled": Control("3", ("1", "2", "3", "4", "5", "6"), 1, 100, whole=True),
    "layer_index": Control("1", ("0", "1", "2", "3", "5", "7", "11", "15", "23", "31", "47"), 0, 10_000, whole=True),
}
_VARIANCES = ("0.01", "0.02", "0.05", "0.1", "0.2", "0.25", "0.5", "1", "2", "4", "5", "10", "20", "50", "100")
_TEMPERATURES = ("0.1", "0.15", "0.2", "0.3", "0.5", "0.7", "1", "1.5", "2", "3", "5", "7", "10")
CONTROLS: Mapping[str, Control] = {
    "d_k": Control("64", tuple(f"{2**k}" for k in range(11)), 1, 1024, whole=True),
    "keys": Control("256", tuple(f"{2**k}" for k in range(1, 12)), 2, 2048, whole=True),
    "components": Control("normal", ("normal", "uniform", "signs", "Laplace")),
    "query_variance": Control("1", _VARIANCES, 1e-6, 1e6),
    "key_variance": Control("1", _VARIANCES, 1e-6, 1e6),
    "rule": Control("sqrt_dk", tuple(CONTROL_BY_RULE)),
    "parameter": Control("none", ("none",), -1e4, 1e4, none=True),
    "overlay": Control("none", ("none", "sqrt_dk", "off")),
    "temperature": Control("1", _TEMPERATURES, 1e-3, 1e3),
    "softcap": Control("none", ("1", "2", "5", "10", "15", "20", "30", "50", "100", "none"), 0.1, 1e4, none=True),
    "dtype": Control("float32", ("float64", "float32", "bfloat16", "float16")),
    "seed": Control("0", tuple(f"{k}" for k in range(21)), 0, 2**32 - 1, whole=True),
}


@dataclass(frozen=True, slots=True)
class ExplorerSettings:
    """The chosen values; see `CONTROLS`."""

    d_k: int
    keys: int
    components: str
    query_variance: float
    key_variance: float
    rule: str
    parameter: float | None
    overlay: str
    temperature: float
    softcap: float | None
    dtype: str
    seed: int

    def scale_rule(self) -> ScaleRule:
        """Return the scale rule with its parameter."""
        return SCALES[self.rule]() if self.parameter is None else SCALES[self.rule](self.parameter)

    def sides(self) -> list[ExplorerSettings]:
        """Return the settings of each scale that the figures draw: the chosen one, then the overlaid one if it differs.

        Example:
            >>> [one.rule for one in parse_settings({}).sides()]
            ['sqrt_dk', 'none']
            >>> [one.rule for one in parse_settings({"rule": "none"}).sides()]
            ['none']
        """
        chosen = replace(self, overlay="off")  # one key for caches, whatever is overlaid
        return (
            [chosen]
            if self.overlay in ("off", self.rule)
            else [chosen, replace(chosen, rule=self.overlay, parameter=None)]
        )


class RefusedValueError(InvalidValueError):
    """A typed value can't be used. Holds the page's message, so that it can be translated."""

    def __init__(self, message: Message) -> None:
        super().__init__(message, hint="See the page.")
        self.message = message


def _refused(control: str, why: Message) -> RefusedValueError:
    return RefusedValueError(Message("app.error.control", name=Message(f"app.control.{control}"), said=why))


def parse_settings(typed: Mapping[str, object]) -> ExplorerSettings:
    """Return the settings for typed values; a missing value has its default.

    Raises:
        RefusedValueError: a value is not a number, out of range, or not offered.

    Example:
        >>> parse_settings({"d_k": "128", "rule": "fixed"}).parameter
        0.125
    """
    rule = str(_read("rule", CONTROLS["rule"], typed))
    values: dict[str, object] = {
        name: _read(name, control, typed) for name, control in CONTROLS.items() if name != "parameter"
    }
    of_rule = CONTROL_BY_RULE[rule]
    given = str(typed.get("parameter", "none")).strip()
    # rules without a parameter leave "none" in the field: the next rule then takes its default
    wanted = {} if given in ("", "none") else {"parameter": given}
    values["parameter"] = None if of_rule is None else _read("parameter", of_rule, wanted)
    return ExplorerSettings(**values)  # type: ignore[arg-type]


def _read(name: str, control: Control, typed: Mapping[str, object]) -> str | int | float | None:
    text = str(typed.get(name, control.default)).strip()
    if control.low is None:
        if text not in control.offered:
            raise _refused(
                name, Message("app.error.choice", got=repr(text[:LONGEST_VALUE]), offered=", ".join(control.offered))
            )
        return text
    if control.none and text == "none":
        return None
    try:
        number = float(text) if len(text) <= LONGEST_VALUE and text.isascii() else math.nan
    except ValueError:
        number = math.nan
    whole = not control.whole or number.is_integer()
    if not (control.low <= number <= control.high and whole):  # false for NaN too
        kind = "whole" if control.whole else "number"
        low, high = f"{control.low:.10g}", f"{control.high:.10g}"
        raise _refused(name, Message(f"app.error.{kind}", got=repr(text[:LONGEST_VALUE]), low=low, high=high))
    return int(number) if control.whole else number


def address(settings: ExplorerSettings) -> str:
    """Return the query of the page's address that restores these settings, without values at their default.

    Example:
        >>> address(parse_settings({"d_k": "128", "softcap": "30"}))
        'd_k=128&softcap=30'
    """
    told = {field.name: getattr(settings, field.name) for field in fields(settings)}
    texts = {
        name: value if isinstance(value, str) else f"{value:.17g}" for name, value in told.items() if value is not None
    }
    of_rule = CONTROL_BY_RULE[settings.rule]
    defaults = {name: control.default for name, control in CONTROLS.items()}
    if of_rule is not None:  # the parameter's default depends on the rule
        defaults["parameter"] = of_rule.default
    return urlencode({name: _short(text) for name, text in texts.items() if _short(text) != defaults[name]})


def _short(text: str) -> str:
    """Return a number with the fewest digits that restore it; other texts are unchanged."""
    try:
        return f"{float(text):g}" if float(f"{float(text):g}") == float(text) else repr(float(text))
    except ValueError:
        return text


def texts(settings: ExplorerSettings) -> dict[str, str]:
    """Return the text of each control for these settings."""
    values = {field.name: getattr(settings, field.name) for field in fields(settings)}
    return {name: "none" if value is None else _short(str(value)) for name, value in values.items()}


def slider_words(name: str, control: Control, language: Language) -> dict[str, str]:
    """Return what a slider shows for a value that is no number: "none" for a softcap that is off."""
    return {"none": word(f"app.offered_{name}.none", language)} if control.none and name != "parameter" else {}

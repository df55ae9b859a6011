"""The explorer as one HTML file that needs no server: what it shows is computed in the page, in JavaScript.

The page's formulas are a second copy of `sqrtdk.scales`, `sqrtdk.theory` and `sqrtdk.stats`, for components of mean 0;
the tests run them in a browser and hold them against Python. Controls, sentences, the table of the softmax of Gaussian
logits and the numbers of the dtypes are this package's own, written into the page.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib.resources import files
from typing import Any

import torch
from markupsafe import Markup

from sqrtdk.extending import Choice
from sqrtdk.messages import catalogue_text
from sqrtdk.report import page
from sqrtdk.stats.heads import LOGIT_BINS
from sqrtdk.theory.ranges import RANGE_DTYPES
from sqrtdk_lab.app import sample
from sqrtdk_lab.app.figures import EXPLORER_FIGURES, HALVES
from sqrtdk_lab.app.settings import CONTROL_BY_RULE, CONTROLS, Control

STATIC_CONTROLS = [name for name in CONTROLS if name != "dtype"]  # the page computes in float64
STATIC_DTYPES = (*HALVES, "float32")  # of the range forecasts
_NAMED = ("rule", "overlay", "components")  # controls whose entries are words
_SHOWN = {  # table of the catalogue -> the entries that the script says
    "app.error": ("title", "control", "choice", "number", "whole"),
    "app.legend": (
        *("measured", "same", "over_none", "over_sqrt_dk", "theory", "uncapped", "rows", "mean", "here"),
        *("rms", "median", "high", "low", "after", "before", "limit"),
        *(f"{dtype}_{place}" for dtype in HALVES for place in ("after", "before")),
    ),
    "app.row": ("scale", "ratio", "std", "max", "entropy", "effective", "peak", "saturated", "jacobian", "gradient"),
    "app.column": (
        *("measured", "expected", "textbook", "dtype", "place", "largest", "limit", "margin", "overflow", "step"),
    ),
    "app.place": ("after", "before"),
    "app.glance": ("caption",),
    "app.range": ("caption",),
    "app.page": ("title",),
    "app.offered_softcap": ("none",),
}


def explorer_page(language: Choice = "auto") -> str:
    """Return the static explorer as a complete HTML document, which opens from disk and fetches nothing.

    Args:
        language: "en" or "zh-CN", the language that it opens in; "auto" follows the reader's browser. A button
            switches.

    Raises:
        InvalidValueError: There is no such language.

    Example:
        >>> explorer_page("zh-CN")[:75]
        '<!doctype html>\\n<html lang="zh-CN" data-opens="zh-CN">\\n<head>\\n<meta charset'
    """
    context = {
        "title": catalogue_text("app.page.title"),
        "figures": list(EXPLORER_FIGURES),
        "payload": Markup(page.script_json(_payload())),
    }
    scripts = ("formulas", "draws", "charts", "sliders")
    return page.render(
        "explorer", context, languages=True, before=scripts, opens=language, home=__package__, styles=("shared",)
    )


def _payload() -> dict[str, Any]:
    table = json.loads(files("sqrtdk.theory").joinpath("gaussian_table.json").read_text(encoding="utf-8"))
    return {
        "words": {id: [catalogue_text(id).en, catalogue_text(id).zh] for id in _ids()},
        "controls": {name: _control(CONTROLS[name]) for name in STATIC_CONTROLS},
        "by_rule": {rule: control and _control(control) for rule, control in CONTROL_BY_RULE.items()},
        "sizes": {
            "sets": sample.SETS,
            "queries": sample.QUERIES,
            "value_dim": sample.SAMPLE_VALUE_DIM,
            "largest_dim": int(CONTROLS["d_k"].high),
            "bins": LOGIT_BINS,
            "dims": sample.SHOWN_DIMS,
            "range_dims": sample.RANGE_DIMS,
            "halves": HALVES,
        },
        "dtypes": {name: _limits(RANGE_DTYPES[name]) for name in STATIC_DTYPES},
        "table": {name: table[name] for name in ("n", "sigma", "entropy", "peak", "jacobian")},
    }


def _ids() -> Iterator[str]:
    for table, entries in _SHOWN.items():
        yield from (f"{table}.{entry}" for entry in entries)
    yield from (f"app.control.{name}" for name in STATIC_CONTROLS)
    yield from (f"app.parameter.{rule}" for rule, control in CONTROL_BY_RULE.items() if control is not None)
    yield from (f"app.offered_{name}.{value}" for name in _NAMED for value in CONTROLS[name].offered)


def _control(control: Control) -> Mapping[str, Any]:
    """Return a control as JSON; the parameter has the bounds of its rule, and none of its own."""
    return asdict(control) | ({"high": None} if control.low is None else {})


def _limits(dtype: torch.dtype) -> dict[str, float]:
    info = torch.finfo(dtype)
    return {"max": info.max, "eps": info.eps, "tiny": info.tiny}

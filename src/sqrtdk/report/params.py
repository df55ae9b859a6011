"""Tables of attention parameters, from the document of `sqrtdk.models.parameters`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

from sqrtdk._sites import fold_sites
from sqrtdk.report.console import drawn
from sqrtdk.report.plain import plain

_COLUMNS = ("layers", "d_model", "heads", "kv heads", "d_k", "a layer", "total")
_MOST_NOTES = 8


def to_text(document: dict[str, Any], *, width: int = 100, color: bool = False) -> str:
    """Draw the document as tables."""

    def draw(console: Console) -> None:
        if document["kind"] == "presets":
            console.print(_all_presets(document["presets"]))
            return
        console.print(_summary(document), style="bold")
        if document["kind"] == "preset":
            console.print(f"sizes: {document['source']}", style="dim")
        for note in document.get("notes", [])[:_MOST_NOTES]:
            console.print(plain(note), style="dim")
        console.print()
        console.print(_preset_table(document) if document["kind"] == "preset" else _model_table(document))

    return drawn(draw, width, color)


def _summary(document: dict[str, Any]) -> str:
    attention, whole = document["attention_parameters"], document["parameters"]
    share = f" ({attention / whole:.1%})" if whole else ""
    return f"{plain(document['target'])}: {attention:,} of {whole:,} parameters are attention's{share}"


def _table(*names: str, left: int = 1, last_left: bool = True) -> Table:
    """A table without lines: the first columns and the last left, numbers right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for at, name in enumerate(names):
        is_text = at < left or (last_left and at == len(names) - 1)
        table.add_column(name, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    return table


def _all_presets(presets: list[dict[str, Any]]) -> Table:
    table = _table("preset", *_COLUMNS, "of all", last_left=False)
    for preset in presets:
        share = f"{preset['attention_parameters'] / preset['parameters']:.1%}"
        for at, layers in enumerate(preset["layers"]):
            last = at == len(preset["layers"]) - 1
            name = preset["name"] if len(preset["layers"]) == 1 else f"{preset['name']} {layers['name']}"
            table.add_row(name, *_sizes(layers), share if last else "")
    return table


def _preset_table(document: dict[str, Any]) -> Table:
    table = _table("layer", *_COLUMNS, "formula of a layer")
    for layers in document["layers"]:
        once = f"; + {layers['once']} in one of them" if layers["once"] else ""
        table.add_row(layers["name"], *_sizes(layers), layers["formula"] + once)
    return table


def _sizes(layers: dict[str, Any]) -> list[str]:
    names = ("count", "d_model", "heads", "kv_heads", "head_dim", "parameters_each", "parameters")
    return [f"{layers[name]:,}" for name in names]


def _model_table(document: dict[str, Any]) -> Table:
    table = _table("site", "class", "layers", "a layer", "total", "parameters", left=2)
    for site, group in _equal(document["layers"]):
        first = group[0]
        total = sum(layer["parameters"] for layer in group)
        weights = first["formula"] or ", ".join(_shown(name, shape) for name, shape in first["weights"].items())
        table.add_row(
            site, plain(first["class"]), f"{len(group):,}", f"{first['parameters']:,}", f"{total:,}", plain(weights)
        )
    return table


def _equal(layers: list[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Layers of equal class and parameters, under the sites that they fold to, in order."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for layer in layers:
        key = json.dumps([layer["class"], layer["weights"], layer["parameters"], layer["formula"]])
        groups.setdefault(key, []).append(layer)
    for group in groups.values():
        by_site = {layer["site"]: layer for layer in group}
        yield ", ".join(plain(site) or "(root)" for site in fold_sites(by_site)), group


def _shown(name: str, shape: list[int]) -> str:
    return f"{name.removesuffix('.weight')} {'x'.join(map(str, shape))}"

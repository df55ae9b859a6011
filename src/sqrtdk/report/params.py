"""Draws tables of attention parameters from the document of `sqrtdk.models.parameters`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from sqrtdk._language import Language
from sqrtdk._sites import ROOT_NAME, fold_sites
from sqrtdk.messages import Message, named
from sqrtdk.report.console import TableColumn
from sqrtdk.report.printer import Printer, printed
from sqrtdk.report.speaker import Speaker

# titles are keys of words.column; one that is not there, as "d_model", stands for itself
_SIZES = tuple(
    TableColumn(title, right=True) for title in ("layers", "d_model", "heads", "kv_heads", "d_k", "a_layer", "total")
)
_OF_A_MODEL = (
    TableColumn("site"),
    TableColumn("class"),
    *(TableColumn(title, right=True) for title in ("layers", "a_layer", "total")),
    TableColumn("parameters", prose=True),
)
_MOST_PARAMS_NOTES = 8


def to_text(document: dict[str, Any], *, width: int = 100, color: bool = False, language: Language = "en") -> str:
    """Return the count of parameters as tables for the terminal.

    Args:
        document: Document of `sqrtdk params --json`, of one preset or of all.
        width: Columns at which lines wrap.
        color: Whether to add ANSI colours.
        language: "en" or "zh".
    """

    def draw(printer: Printer) -> None:
        if document["kind"] == "presets":
            columns = (TableColumn("preset"), *_SIZES, TableColumn("of_all", right=True))
            printer.table(_titled(columns), list(_all_presets(document["presets"])))
            return
        printer.paragraph(_summary(document), style="bold")
        if document["kind"] == "preset":
            printer.paragraph(Message("terminal.params.sizes", source=document["source"]), style="dim")
        for note in document.get("notes", [])[:_MOST_PARAMS_NOTES]:
            printer.paragraph(note, style="dim")
        printer.blank()
        if document["kind"] == "preset":
            columns = (TableColumn("layer"), *_SIZES, TableColumn("formula_of_a_layer", prose=True))
            printer.table(_titled(columns), list(_preset_rows(document["layers"])))
        else:
            printer.table(_titled(_OF_A_MODEL), list(_model_rows(printer, document["layers"])), lead=2)

    return printed(draw, width, color, language)


def _titled(columns: Iterable[TableColumn]) -> list[TableColumn]:
    return [replace(column, title=named("words.column", column.title)) for column in columns]


def _summary(document: dict[str, Any]) -> str:
    attention, whole = document["attention_parameters"], document["parameters"]
    values = {"target": document["target"], "attention": f"{attention:,}", "whole": f"{whole:,}"}
    if not whole:
        return Message("terminal.params.summary", **values)
    return Message("terminal.params.summary_share", share=f"{attention / whole:.1%}", **values)


def _all_presets(presets: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    for preset in presets:
        share = f"{preset['attention_parameters'] / preset['parameters']:.1%}"
        for at, layers in enumerate(preset["layers"]):
            last = at == len(preset["layers"]) - 1  # the share is of the whole preset and is shown once
            name = preset["name"] if len(preset["layers"]) == 1 else f"{preset['name']} {layers['name']}"
            yield name, *_sizes(layers), share if last else ""


def _preset_rows(every: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    for layers in every:
        formula = layers["formula"]
        if layers["once"]:
            formula = Message("terminal.params.once", formula=formula, once=layers["once"])
        yield layers["name"], *_sizes(layers), formula


def _sizes(layers: dict[str, Any]) -> list[str]:
    names = ("count", "d_model", "heads", "kv_heads", "head_dim", "parameters_each", "parameters")
    return [f"{layers[name]:,}" for name in names]


def _model_rows(speaker: Speaker, layers: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    for sites, group in _equal(layers):
        first = group[0]
        total = sum(layer["parameters"] for layer in group)
        weights = first["formula"] or speaker.join((_shown(*weight) for weight in first["weights"].items()), "list")
        numbers = (len(group), first["parameters"], total)
        yield speaker.join(sites, "list"), first["class"], *(f"{number:,}" for number in numbers), weights


def _equal(layers: list[dict[str, Any]]) -> Iterator[tuple[list[str], list[dict[str, Any]]]]:
    """Yield each group of layers with equal class and parameters, with its folded sites, in order."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for layer in layers:
        # as JSON, because the weights are a dictionary and can't be hashed
        key = json.dumps([layer["class"], layer["weights"], layer["parameters"], layer["formula"]])
        groups.setdefault(key, []).append(layer)
    for group in groups.values():
        by_site = {layer["site"]: layer for layer in group}
        yield [site or ROOT_NAME for site in fold_sites(by_site)], group


def _shown(name: str, shape: list[int]) -> str:
    return f"{name.removesuffix('.weight')} {'x'.join(map(str, shape))}"

"""`sqrtdk params [TARGET]`: how many parameters attention has, a layer and in all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sqrtdk.cli.errors import reported
from sqrtdk.report.plain import plain

if TYPE_CHECKING:
    from rich.table import Table
    from torch import nn

SCHEMA_VERSION = 1
_COLUMNS = ("layers", "d_model", "heads", "kv heads", "d_k", "a layer", "total")
_MOST_NOTES = 8


def params(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="TARGET",
            help="A preset, a directory with config.json, a Hugging Face id, package.module:factory, or demo; "
            "without it, all presets.",
        ),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hugging Face model.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the Python code that comes with the model.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the factory.")] = 0,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the JSON document to FILE instead of stdout.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
    show_traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error was raised.")] = False,
) -> None:
    """Count the parameters of every attention of TARGET, a layer and in all; models are built without weights.

    Exit code 0: counted; 2: usage, configuration or input/output error.
    """
    with reported(show_traceback):
        from sqrtdk.cli.output import colors, print_text, say, width, working
        from sqrtdk.report import files

        files.check_outputs((output,), force)
        with working(f"Counting {plain(target or 'presets')}"):
            document = _document(target, revision, trust_remote_code, seed)
        text = json.dumps(document, indent=2, ensure_ascii=True) + "\n"
        if output is not None:
            files.write_text(output, text, force)
            say(f"JSON report: {output}")
        if json_ and output is None:
            print_text(text)
        else:
            print_text(_to_text(document, width(), colors()))


def _document(target: str | None, revision: str | None, trust_remote_code: bool, seed: int) -> dict[str, Any]:
    """What is printed, as JSON."""
    from sqrtdk.theory.parameters import PRESETS

    head: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "target": target}
    if target is None:
        return head | {"kind": "presets", "presets": [_preset(name) for name in PRESETS]}
    if target in PRESETS and not Path(target).is_dir():
        return head | {"kind": "preset", **_preset(target)}
    return head | {"kind": "model", **_model(target, revision, trust_remote_code, seed)}


def _preset(name: str) -> dict[str, Any]:
    from sqrtdk.theory.parameters import PRESETS, Terms

    preset = PRESETS[name]
    layers = [
        {
            "name": layers.name,
            "count": layers.count,
            "d_model": layers.d_model,
            "heads": layers.heads,
            "kv_heads": layers.kv_heads,
            "head_dim": layers.head_dim,
            "formula": layers.each.formula,
            "parameters_each": layers.each.total,
            "once": Terms(layers.once).formula if layers.once else None,
            "parameters_once": Terms(layers.once).total,
            "parameters": layers.total,
        }
        for layers in preset.layers
    ]
    return {
        "name": name,
        "source": preset.source,
        "attention_parameters": preset.attention,
        "parameters": preset.parameters,
        "layers": layers,
    }


def _model(target: str, revision: str | None, trust_remote_code: bool, seed: int) -> dict[str, Any]:
    from sqrtdk.errors import ModelError
    from sqrtdk.nn import attention_parts

    module, notes = _built(target, revision, trust_remote_code, seed)
    parts = attention_parts(module)
    if not parts:
        raise ModelError(
            f"{type(module).__name__} holds no module whose class is named an attention",
            hint="`sqrtdk check` finds attention by what a model computes, whatever its classes are called.",
        )
    layers = [
        {
            "site": part.site,
            "class": part.cls,
            "formula": part.formula,
            "weights": {name: list(shape) for name, shape in part.weights},
            "parameters": part.parameters,
        }
        for part in parts
    ]
    return {
        "class": type(module).__name__,
        "attention_parameters": sum(part.parameters for part in parts),
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "notes": list(notes),
        "layers": layers,
    }


def _built(target: str, revision: str | None, trust_remote_code: bool, seed: int) -> tuple[nn.Module, tuple[str, ...]]:
    """The model on the meta device; a factory that can't be built there is built for real."""
    from sqrtdk.errors import ModelError
    from sqrtdk.models.build import build_model
    from sqrtdk.models.demo import load_demo
    from sqrtdk.models.factory import call_factory, file_as_module, is_factory
    from sqrtdk.models.hub import fetch
    from sqrtdk.models.limits import check_seed
    from sqrtdk.theory.parameters import PRESETS

    check_seed(seed)
    if target == "demo" or target.startswith("demo:"):
        return load_demo(target), ()
    path = Path(target).expanduser()
    path = path.parent if path.name == "config.json" and path.is_file() else path
    if is_factory(target) and not path.is_dir():
        try:
            return call_factory(target, static=True, seed=seed)[0], ()
        except ModelError:
            return call_factory(target, seed=seed)[0], ("the factory can't run on the meta device: built with weights",)
    if not path.is_dir():
        if hint := file_as_module(target):
            raise ModelError(f"{target!r} names a file, not a module", hint=hint)
        if target.startswith((".", "/", "~")) or target.count("/") > 1:
            raise ModelError(f"there is no directory {target!r}", hint="`sqrtdk params` lists the presets.")
        try:
            path = fetch(target, revision=revision, weights=False, trust_remote_code=trust_remote_code)
        except ModelError as error:
            if "/" in target:
                raise
            raise ModelError(
                f"there is no preset {target!r}; {error}", hint=f"The presets are {', '.join(PRESETS)}."
            ) from error
    module, _, notes = build_model(path, static=True, trust_remote_code=trust_remote_code)
    return module, notes


def _to_text(document: dict[str, Any], width: int, color: bool) -> str:
    """The document as tables."""
    import io

    from rich.console import Console

    console = Console(
        file=io.StringIO(),
        width=max(width, 40),
        force_terminal=color,
        no_color=not color,
        color_system="standard" if color else None,
        legacy_windows=False,
        markup=False,
        highlight=False,
        emoji=False,
    )
    with console.capture() as capture:
        if document["kind"] == "presets":
            console.print(_all_presets(document["presets"]))
        else:
            console.print(_summary(document), style="bold")
            if document["kind"] == "preset":
                console.print(f"sizes: {document['source']}", style="dim")
            for note in document.get("notes", [])[:_MOST_NOTES]:
                console.print(plain(note), style="dim")
            console.print()
            console.print(_preset_table(document) if document["kind"] == "preset" else _model_table(document))
    return "\n".join(line.rstrip() for line in capture.get().split("\n"))


def _summary(document: dict[str, Any]) -> str:
    attention, whole = document["attention_parameters"], document["parameters"]
    share = f" ({attention / whole:.1%})" if whole else ""
    return f"{plain(document['target'])}: {attention:,} of {whole:,} parameters are attention's{share}"


def _table(*names: str, left: int = 1, last_left: bool = True) -> Table:
    """A table without lines: the first columns and the last left, numbers right."""
    from rich.table import Table

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
    from sqrtdk.report.fold import fold_sites

    groups: dict[str, list[dict[str, Any]]] = {}
    for layer in layers:
        key = json.dumps([layer["class"], layer["weights"], layer["parameters"], layer["formula"]])
        groups.setdefault(key, []).append(layer)
    for group in groups.values():
        by_site = {layer["site"]: layer for layer in group}
        yield ", ".join(plain(site) or "(root)" for site in fold_sites(by_site)), group


def _shown(name: str, shape: list[int]) -> str:
    return f"{name.removesuffix('.weight')} {'x'.join(map(str, shape))}"

"""Finds the layers of a Python loop: which steps belong to `params["layers"][3]`.

    for p in params["layers"]:          every layer runs the same lines, so lines and functions say nothing of the
        x = x + attention(norm(x), p)   layer: its parameters do
        x = x + mlp(norm(x), p)

A step that reads `layers.3.attn.wq` is of layer 3. Between the last parameter of a layer and the first of the next, the
next layer begins where the program goes back to an earlier line of the outermost function. What lies before the first
and behind the last layer belongs to them if it is on a line that another layer has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from sqrtdk.frontends.program import FlatStep

Key = tuple[Any, ...]  # functions and lines of a step, from the outermost to the loop's


def number_layers(steps: Sequence[FlatStep], parameters: Mapping[int, str]) -> tuple[FlatStep, ...]:
    """Return the steps with the paths of their layers, where parameters lie in with_layer_numbers lists.

    Args:
        steps: of a program whose modules are functions.
        parameters: names of the parameters by reference.
    """
    anchors = _anchors(steps, parameters)
    marks = [(at, layer) for at, layer in anchors if layer]
    if not marks:
        return _placed(steps, [_numbered_part(step.path) for step in steps])
    of_step: list[str] = [""] * len(steps)
    cuts = [(a, b, *_boundary(steps, a, b)) for (a, one), (b, other) in pairwise(marks)
            if one != other]  # fmt: skip
    depth = min((depth for *_, depth in cuts if depth is not None), default=0)
    begins = {b: cut for _, b, cut, _ in cuts}
    first, last = marks[0][0], marks[-1][0]
    shared = _shared_lines(steps, cuts, depth)
    begin = first
    while begin > 0 and _key(steps[begin - 1], depth) in shared and not _outside(begin - 1, anchors):
        begin -= 1
    end = last + 1
    while end < len(steps) and _key(steps[end], depth) in shared and not _outside(end, anchors):
        end += 1
    at, layer = begin, marks[0][1]
    for mark, name in [*marks, (end, "")]:
        cut = begins.get(mark, mark)
        for here in range(at, cut if mark != end else end):
            of_step[here] = layer
        at, layer = max(at, cut), name or layer
    return _placed(steps, of_step)


def _anchors(steps: Sequence[FlatStep], parameters: Mapping[int, str]) -> list[tuple[int, str]]:
    """Return the steps that read parameters, with the path of the layer: "layers.3", or "" for none."""
    found = []
    for at, step in enumerate(steps):
        names = [parameters[ref] for ref in step.reads if type(ref) is int and ref in parameters]
        if names and not any(part.isdigit() for part in step.path.split(".")):
            found.append((at, _layer(names[0])))
    return found


def _numbered_part(path: str) -> str:
    """Return a path up to its last number: the layer of a scan."""
    parts = path.split(".")
    numbers = [at for at, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[-1] + 1]) if numbers else ""


def _layer(name: str) -> str:
    parts = name.split(".")
    at = next((at for at, part in enumerate(parts) if part.isdigit()), None)
    return "" if at is None else ".".join(parts[: at + 1])


def _boundary(steps: Sequence[FlatStep], a: int, b: int) -> tuple[int, int | None]:
    """Return where the next layer begins between two steps of different layers, and the depth of the loop."""
    best: tuple[int, int, int] | None = None
    for at in range(a + 1, b + 1):
        for depth, (old, new) in enumerate(zip(steps[at - 1].frames, steps[at].frames, strict=False)):
            if (old.file, old.function) != (new.file, new.function):
                break
            if old.line != new.line:
                back = old.line - new.line
                if back > 0 and (best is None or (depth, -back) <= best[:2]):
                    best = depth, -back, at
                break
    return (b, None) if best is None else (best[2], best[0])


def _key(step: FlatStep, depth: int) -> Key:
    return tuple((frame.file, frame.function, frame.line) for frame in step.frames[: depth + 1])


def _shared_lines(steps: Sequence[FlatStep], cuts: Sequence[tuple[int, int, int, int | None]], depth: int) -> set[Key]:
    """Return the lines that steps of layers are on, from what lies between two layers and within one of them."""
    found: set[Key] = set()
    for a, b, cut, at in cuts:
        if at is not None:
            found |= {_key(steps[here], depth) for here in range(a, b + 1) if here < cut or here >= cut}
    return found


def _outside(at: int, anchors: Sequence[tuple[int, str]]) -> bool:
    """Return whether a step reads a parameter of no layer, such as the embedding."""
    return any(here == at and not layer for here, layer in anchors)


def _placed(steps: Sequence[FlatStep], layers: Sequence[str]) -> tuple[FlatStep, ...]:
    inner = [_inside(step.path, layer) for step, layer in zip(steps, layers, strict=True)]
    paths: dict[str, list[list[str]]] = {}
    for step, layer, path in zip(steps, layers, inner, strict=True):
        if layer and step.name != "row":
            paths.setdefault(layer, []).append(path)
    # what all steps of a layer are in is the function of the layer itself: `block`
    common = {layer: _common_length(every) for layer, every in paths.items()}
    made = []
    for step, layer, path in zip(steps, layers, inner, strict=True):
        if layer:
            step = replace(step, path=".".join([layer, *path[common.get(layer, 0) :]]))
        made.append(step)
    return tuple(made)


def _inside(path: str, layer: str) -> list[str]:
    """Return the names of a path below its layer."""
    below = path.removeprefix(layer).lstrip(".") if path == layer or path.startswith(f"{layer}.") else path
    return below.split(".") if below else []


def _common_length(paths: Sequence[Sequence[str]]) -> int:
    length = 0
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        length += 1
    return length

"""Flat programs without any framework: regions, layers of a loop, wider dtypes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sqrtdk.frontends.layers import number_layers
from sqrtdk.frontends.module import Bound, TracedProgram, foreign_module
from sqrtdk.frontends.program import FlatProgram, FlatStep, Literal, Region, RunDtypes, plan


@dataclass(frozen=True)
class Frame:
    """Where a step came from."""

    file: str
    function: str
    line: int


def step(name: str, run: Any, reads: tuple[Any, ...], gives: int, path: str = "", *lines: int) -> FlatStep:
    frames = tuple(Frame("net.py", f"f{depth}", line) for depth, line in enumerate(lines or (1,)))
    return FlatStep(name, run, reads, (gives,), (torch.float32,), path, "net.py", frames[-1].line, frames)


def times(numbers: RunDtypes, a: Any, b: Any) -> Tensor:
    product: Tensor = a * b
    return product


def shape(region: Region) -> Any:
    return [shape(item) if isinstance(item, Region) else item.name for item in region.items]


def test_neighbouring_steps_of_a_module_are_one_call() -> None:
    """What a region reads goes in as arguments, what is read later comes out; a container of layers does not run."""
    steps = (
        step("embed", times, (0, Literal(2.0)), 1),
        step("q", times, (1, 9), 2, "layers.0.attn"),
        step("out", times, (2, 1), 3, "layers.0.attn"),
        step("add", times, (3, 1), 4, "layers.0"),
        step("q", times, (4, 9), 5, "layers.1.attn.heads"),
    )
    program = FlatProgram((0,), {9: "w"}, {}, steps, (5,))
    region = plan(program, {"", "layers", "layers.0", "layers.0.attn", "layers.1", "layers.1.attn"})
    assert shape(region) == ["embed", [["q", "out"], "add"], [["q"]]]
    layer: Any = region.items[1]
    assert (layer.path, layer.takes, layer.gives) == ("layers.0", (1,), (4,))
    assert (layer.items[0].takes, layer.items[0].gives) == ((1,), (3,))
    assert region.frees == ((0,), (1,), (4,))


def test_layers_of_a_loop_are_told_by_their_parameters() -> None:
    """Two turns over lines 2 to 4 between an embedding and a norm: the first line of a turn reads no parameter."""
    names = {10: "embed", 11: "layers.0.w", 12: "layers.1.w", 13: "norm"}
    steps = [step("embed", times, (0, 10), 1, "", 1)]
    for turn in range(2):
        at = 2 + 3 * turn
        steps += [
            step("square", times, (at - 1, at - 1), at, "", 2),
            step("weigh", times, (at, 11 + turn), at + 1, "f1", 3, 8),
            step("add", times, (at + 1, at), at + 2, "", 4),
        ]
    steps += [step("mean", times, (7, 7), 8, "", 5), step("norm", times, (8, 13), 9, "", 5)]
    paths = [one.path for one in number_layers(steps, names)]
    layers = [path for n in range(2) for path in (f"layers.{n}", f"layers.{n}.f1", f"layers.{n}")]
    assert paths == ["", *layers, "", ""]


class Source:
    """A program of one product: x * w rounded to float16, then times 3."""

    signature = inspect.Signature([inspect.Parameter("x", inspect.Parameter.POSITIONAL_OR_KEYWORD)])

    def __init__(self) -> None:
        self.traced: list[Any] = []

    def tensor(self, name: str, indices: tuple[int, ...]) -> Tensor:
        assert (name, indices) == ("net.w", ())
        return torch.tensor([1.0, 1 / 3])

    def bind(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> Bound:
        x = self.signature.bind(*args, **named).arguments["x"]
        return Bound((x,), (torch.float32,), tuple(x.shape), None)

    def trace(self, bound: Bound, dtypes: Mapping[str, torch.dtype]) -> TracedProgram:
        self.traced.append((bound.key, dict(dtypes)))
        rounded = FlatStep("cast", lambda numbers, x: x, (2,), (3,), (torch.float16,), "net", "net.py", 7)
        back = FlatStep("cast", lambda numbers, x: x, (3,), (4,), (torch.float32,), "net", "net.py", 8)
        three = step("three", times, (4, Literal(3.0)), 5, "net")
        program = FlatProgram(
            (0,), {1: "net.w"}, {}, (step("times", times, (0, 1), 2, "net"), rounded, back, three), (5,)
        )
        return TracedProgram(program, lambda results: results[0], {"net.w": ("net.w", ())})


def test_a_program_is_a_module() -> None:
    source, x = Source(), torch.tensor([1.0, 1.0])
    module, _ = foreign_module(source, source.bind((x,), {}), "Net")
    assert [name for name, _ in module.named_parameters()] == ["net.w"]
    assert torch.equal(module(x), torch.tensor([1.0, 1 / 3]).half().float() * 3)
    assert torch.equal(module.double()(x.double()), torch.tensor([1.0, 1 / 3]).double() * 3)
    assert len(source.traced) == 1
    module(torch.ones(3, 2))
    assert source.traced[1:] == [((3, 2), {})]
    module.half()(x.half())
    assert source.traced[2:] == [((2,), {"net.w": torch.float16})]

"""Programs with free sizes: their conditions are read, and never run."""

from __future__ import annotations

import itertools
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional

import sqrtdk
from sqrtdk.errors import ModelError
from sqrtdk.graphs import read_exported
from sqrtdk.graphs.guards import read_guards, sizes_meeting

D, H = 32, 2
X = torch.randn(2, 8, D)
FREE = {0: Dim.AUTO, 1: Dim.AUTO}


class Net(nn.Module):
    """An attention of x, or of a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
        self.places = nn.Parameter(torch.randn(64, D))

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (H, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class Blocks(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x) if x.shape[1] % 4 == 0 else x


class Halves(Net):
    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, 1)
        return self.attend(first) + self.attend(second)


class Placed(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x + self.places[: x.shape[1]])


class Pair(Net):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return self.attend(x * gate)


CASES: dict[str, tuple[type[nn.Module], tuple[Tensor, ...], int]] = {
    "blocks": (Blocks, (X,), 1),
    "halves": (Halves, (X,), 2),
    "a table of places": (Placed, (X,), 1),
    "two inputs of one length": (Pair, (X, torch.randn(2, 8, 1)), 1),
}


def saved(case: str, path: Path) -> Path:
    make, inputs, _ = CASES[case]
    program = torch.export.export(make().eval(), inputs, dynamic_shapes=tuple(FREE for _ in inputs))
    assert program._guards_code
    torch.export.save(program, path)
    return path


def rewritten(path: Path, lines: list[Any]) -> Path:
    """The file, with other conditions in it."""
    with zipfile.ZipFile(path) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    name = next(name for name in content if "/models/" in name and name.endswith(".json"))
    graph = json.loads(content[name])
    graph["guards_code"] = lines
    content[name] = json.dumps(graph).encode()
    made = path.with_name("changed.pt2")
    with zipfile.ZipFile(made, "w") as archive:
        for entry, text in content.items():
            archive.writestr(entry, text)
    return made


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES)
def test_a_program_of_free_sizes_is_read(case: str, tmp_path: Path) -> None:
    report = sqrtdk.check(str(saved(case, tmp_path / "m.pt2")))
    assert [judged.verdict for judged in report.calls] == ["exact"] * CASES[case][2]
    assert {judged.call.formula for judged in report.calls} == {"softmax(0.25 * q.k + causal)"}


@pytest.mark.parametrize("trusted", [False, True])
def test_no_line_of_an_untrusted_file_is_run(trusted: bool, tmp_path: Path) -> None:
    sign = tmp_path / "sign"
    line = f"__import__('pathlib').Path({str(sign)!r}).touch() is None"
    path = rewritten(saved("blocks", tmp_path / "m.pt2"), [line, "L['x'].size()[1] > 3"])
    report = sqrtdk.check(str(path), trust_remote_code=trusted)
    read_exported(path, {"x": X}, trust_remote_code=trusted).module(X)
    assert not sign.exists()
    assert any(note.startswith("1 condition on sizes could not be read") for note in report.environment["notes"])


def test_sizes_that_a_program_does_not_take_are_refused(tmp_path: Path) -> None:
    path = saved("blocks", tmp_path / "m.pt2")
    assert read_exported(path, {"x": torch.randn(3, 12, D)}).kind == "exported"
    with pytest.raises(ModelError, match=r"exported for sizes with .*% 4"):
        read_exported(path, {"x": torch.randn(3, 13, D)})


@pytest.mark.parametrize(
    "line",
    [
        "print('x')",
        "L['x'].size().__class__",
        "L['x'].numel() > 3",
        "[1 for _ in range(9)]",
        "2 ** 9 ** 9",
        "L['x'].size()[1] if 1 else 2",
        "(lambda: 1)()",
        "max(*L)",
        "open",
        "'text' == 'text'",
        "1 +",
        "(" * 500 + "1" + ")" * 500,
        "1+" * 2000 + "1",
        7,
        None,
    ],
)
def test_what_is_no_condition_on_sizes_is_not_worked_out(line: Any) -> None:
    guards = read_guards([line])
    assert (guards.read, guards.unread) == ((), 1)


LINES = [
    "(L['x'].size()[1] % 4) == 0",
    "(((-1) + L['x'].size()[1] + ((1 + L['x'].size()[1]) // 2)) // ((1 + L['x'].size()[1]) // 2)) == 2",
    "(32*L['x'].size()[1]) != (32*max(1, (1 + L['x'].size()[1]) // 2))",
    "2 < L['x'].size()[0] <= 9 and not L['x'].size()[1] == 11",
    "L['x'].size()[0] == 3 or L['x'].size()[1] == 5",
]


@pytest.mark.parametrize("line", LINES)
def test_a_condition_is_what_python_makes_of_it(line: str) -> None:
    guards = read_guards([line])
    assert guards.unread == 0
    for shape in itertools.product(range(2, 12), range(2, 14)):
        right = bool(eval(line, {}, {"L": {"x": torch.empty(shape, device="meta")}, "max": max}))
        assert (guards.broken_at({"x": shape}) is None) is right


def test_sizes_that_meet_a_condition_are_near_those_that_are_wanted() -> None:
    guards = read_guards(["L['x'].size()[0] == L['y'].size()[0]", "(L['x'].size()[1] % 16) == 0"])
    sizes = sizes_meeting(guards, {"a": 2, "b": 37, "c": 3}, lambda n: {"x": (n["a"], n["b"]), "y": (n["c"],)})
    assert sizes["a"] == sizes["c"]
    assert sizes["b"] in (32, 48)
    impossible = read_guards(["L['x'].size()[0] < 0"])
    assert sizes_meeting(impossible, {"a": 2}, lambda n: {"x": (n["a"],)}) == {"a": 2}


class Counted(tuple[int, ...]):
    """A shape that counts how often a condition looks at one of its sizes."""

    looks = 0

    def __getitem__(self, axis: Any) -> Any:
        Counted.looks += 1
        return super().__getitem__(axis)


@pytest.mark.parametrize("count", [1, 8, 512, 4096])
@pytest.mark.parametrize("late", [False, True])
def test_the_work_of_a_search_does_not_grow_with_the_conditions_of_the_file(count: int, late: bool) -> None:
    met, never = "L['x'].size()[1] > 0", "L['x'].size()[0] + L['y'].size()[0] < 0"
    guards = read_guards([met] * (count - 1) + [never] if late else [never] + [met] * (count - 1))
    Counted.looks = 0
    wanted = {"a": 2, "b": 37, "c": 3}
    sizes = sizes_meeting(guards, wanted, lambda n: {"x": Counted((n["a"], n["b"])), "y": Counted((n["c"],))})
    assert sizes == wanted
    assert 0 < Counted.looks <= max(2**13, 2 * count)


def test_sizes_stay_within_the_range_of_a_program() -> None:
    guards = read_guards(["(L['x'].size()[1] % 16) == 0"])
    for bounds, right in (((33, 100), 48), ((2, 47), 32), ((33, 47), 37), ((None, 40), 32)):
        assert sizes_meeting(guards, {"s": 37}, lambda n: {"x": (2, n["s"])}, {"s": bounds}) == {"s": right}

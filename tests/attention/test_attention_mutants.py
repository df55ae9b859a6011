"""Errors planted in the implementation, one at a time: the battery must find each.

The package's own modules are loaded afresh, one of them from a changed syntax tree, beside the real ones, in this
process.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import sqrtdk
from sqrtdk.errors import UnsupportedError
from tests.attention.cases import CASES, CORE, TRIPLES, Case
from tests.attention.judging import Attention, Expected, expect, judge
from tests.attention.mutants import MUTANTS
from tests.attention.small import SIZES
from tests.planting.changes import Planted
from tests.planting.trees import changed_tree
from tests.support.kernel_here import needs_kernel, unable

HOME = Path(sqrtdk.__file__).parent
FRESH = ("sqrtdk._attention", "sqrtdk._resolve", "sqrtdk._arguments", "sqrtdk.impl", "sqrtdk.masks", "sqrtdk.stats")
IMPLEMENTATIONS = ("tiled", "fused", "dense", *(() if unable() else ("cpu",)))
# many values early, so that most errors are found soon
EXACT = [case for case in dict.fromkeys([*CORE, *TRIPLES, *CASES]) if case.dtype in ("f32", "f64")]


class Fresh(MetaPathFinder, Loader):
    """Gives the package's fresh modules, one of them with the error in it."""

    def __init__(self, planted: Planted | None) -> None:
        self.planted = planted

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith(FRESH):
            return None
        place = HOME.joinpath(*name.split(".")[1:])
        packaged = place.is_dir()
        file = place / "__init__.py" if packaged else place.with_suffix(".py")
        return spec_from_loader(name, self, origin=str(file), is_package=packaged)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        file = Path(str(module.__spec__.origin))
        if module.__spec__.submodule_search_locations is not None:
            module.__path__ = [str(file.parent)]
        module.__file__ = str(file)
        text = file.read_text(encoding="utf-8")
        here = self.planted is not None and file == HOME / self.planted.file
        code = changed_tree(text, self.planted) if here else ast.parse(text)
        exec(compile(code, str(file), "exec"), module.__dict__)


@contextmanager
def fresh(planted: Planted | None) -> Iterator[ModuleType]:
    """The module of `attention`, with the error in it."""
    kept = {name: module for name, module in sys.modules.items() if name.startswith(FRESH)}
    bound = dict(vars(sqrtdk))
    for name in kept:
        del sys.modules[name]
    finder = Fresh(planted)
    sys.meta_path.insert(0, finder)
    try:
        yield import_module("sqrtdk._attention")
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.startswith(FRESH)]:
            del sys.modules[name]
        sys.modules.update(kept)
        vars(sqrtdk).clear()
        vars(sqrtdk).update(bound)


def attention_of(module: ModuleType) -> Attention:
    """Its `attention`, in small blocks, taking the real AuxRequest."""
    for name, sizes in SIZES.items():
        vars(sys.modules[name]).update(sizes)

    def attention(*args: Any, return_aux: Any = None, **kwargs: Any) -> Any:
        request = None if return_aux is None else module.AuxRequest(**{f: getattr(return_aux, f) for f in fields_of()})
        return module.attention(*args, return_aux=request, **kwargs)

    return attention


@cache
def fields_of() -> tuple[str, ...]:
    return tuple(asdict(sqrtdk.AuxRequest()))


@cache
def expected_of(case: Case) -> Expected:
    return expect(case)


def killer(attention: Attention) -> str | None:
    """The first case that finds something wrong."""
    for case in EXACT:
        for impl in IMPLEMENTATIONS:
            try:
                found = judge(case, impl, expected_of(case), attention)
            except UnsupportedError:
                if {"cpu": case.cpu_can, "fused": case.fused_can}.get(impl, True):
                    return f"{impl} refuses {case.id}"
                continue
            except Exception as error:
                return f"{impl} {case.id}: {type(error).__name__}: {error}"
            if found:
                return f"{impl} {case.id}: {found[0]}"
    return None


CHEAP = "mask turned round"
MARKS = dict.fromkeys(MUTANTS, pytest.mark.full) | {CHEAP: ()}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[mark, needs_kernel] if "cpu:" in name else mark) for name, mark in MARKS.items()],
)
def test_planted_error_is_found(name: str) -> None:
    with fresh(MUTANTS[name]) as module:
        assert killer(attention_of(module)) is not None, f"nothing finds: {name}"


@pytest.mark.slow
def test_without_a_planted_error_nothing_is_found() -> None:
    real = sqrtdk.attention
    with fresh(None) as module:
        assert module.attention is not real
        assert killer(attention_of(module)) is None


def test_number_of_planted_errors() -> None:
    assert len(MUTANTS) == len(MARKS) >= 40

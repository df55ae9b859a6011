"""The docstrings in Chinese: each parameter of the signature, the sections of the English one, examples that run."""

from __future__ import annotations

import doctest
import inspect
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import DOCS
from tests.docs.test_chinese import HAN, SHAPE, WRONG

TOP = "sqrtdk"
FILES = sorted((DOCS / "site" / "api_zh").glob("*.txt"))
SECTION = re.compile(r"^([A-Z][\w ]*):$", re.MULTILINE)
NAMES = re.compile(r"^    ((?:\w+, )*\w+): ", re.MULTILINE)
FIFTEEN = """attention measure explain merge ring_attention trace check diff record watch qk_clip_ fold_scale_
    entropy_floor laws.ask testing.assert_attention"""


def function(path: Path) -> Callable[..., Any]:
    namespace, _, name = path.stem.rpartition(".")
    return getattr(import_module(namespace), name)  # type: ignore[no-any-return]


def sections(text: str) -> dict[str, str]:
    """The sections of a docstring by their titles."""
    parts = SECTION.split(text)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def listed(text: str) -> list[str]:
    """The parameters that a docstring describes, in its order."""
    return [name for names in NAMES.findall(sections(text).get("Args", "")) for name in names.split(", ")]


def parameters(thing: Callable[..., Any]) -> list[str]:
    """The parameters of a signature; those that only catch wrong calls begin with an underscore."""
    return [name for name in inspect.signature(thing).parameters if not name.startswith("_")]


def test_the_names_that_are_used_most_are_there() -> None:
    assert {path.stem for path in FILES} == {f"{TOP}.{name}" for name in FIFTEEN.split()}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_parameter_of_the_signature_is_described(path: Path) -> None:
    assert sorted(listed(path.read_text(encoding="utf-8"))) == sorted(parameters(function(path)))


def test_a_parameter_that_is_left_out_is_seen() -> None:
    def called(query: int, scale: int, **_unknown: int) -> None: ...

    assert listed("Text.\n\nArgs:\n    query: 查询。\n        继续：x\n\nReturns:\n    输出：y\n") == ["query"]
    assert parameters(called) == ["query", "scale"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_has_the_sections_of_the_english_one(path: Path) -> None:
    english, chinese = sections(str(inspect.getdoc(function(path)))), sections(path.read_text(encoding="utf-8"))
    assert english.keys() - chinese.keys() == set()
    errors = re.compile(r"^    (\w+(?:, \w+)*): ", re.MULTILINE)
    assert set(errors.findall(english["Raises"])) <= set(errors.findall(chinese["Raises"]))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_example_runs(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    example = doctest.DocTestParser().get_doctest(text, {}, path.name, str(path), 0)
    said: list[str] = []
    result = doctest.DocTestRunner().run(example, out=said.append)
    assert not said, "".join(said)
    assert result.attempted


@pytest.mark.parametrize("rule", [rule for rule in WRONG if not rule.startswith("a half-width")])
def test_punctuation_and_spaces(rule: str) -> None:
    places = []
    for path in FILES:
        prose = re.sub(
            r"^ +(?:>>>|\.\.\.|\S+Error).*$|^Example:\n(?:    .*\n)+", "", path.read_text(), flags=re.MULTILINE
        )
        prose = re.sub(r"^ +(?:\w+, )*\w+: ", "", prose, flags=re.MULTILINE)
        prose = re.sub(r"`[^`\n]+`", "\ue000", SHAPE.sub("\ue000", re.sub(r"\n +", "\n", prose)))
        places += [
            f"{path.stem}: {line}"
            for line in prose.split("\n")
            if re.search(f"[{HAN}]", line) and re.search(WRONG[rule], line)
        ]
    assert places == []

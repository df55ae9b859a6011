"""The catalogue: every sentence that code names is there with these values, and none is there that no code names."""

from __future__ import annotations

import ast
import copy
import functools
import json
import pickle
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import sqrtdk
from sqrtdk._json import json_document
from sqrtdk.messages import Message, fields, joined, recorded, said, word
from sqrtdk.messages._catalogue import _FOLDERS, catalogue_text, entries, faults, placeholders, tomllib, topic, topics
from tests.support.lab_here import LAB

SOURCES = [Path(sqrtdk.__file__).parent]
if LAB:
    import sqrtdk_lab

    SOURCES.append(Path(sqrtdk_lab.__file__).parent)
MAKERS = ("Message", "word")
SECTIONS = ("named", "unfilled")  # they take the name of a section
# in a template; not the name of another one, nor that of a section
QUOTED = re.compile(rf"""(?<!named\()["']((?:{"|".join(topics())})\.(?!html\b)[\w.]+)["']""")


@functools.cache
def trees() -> Mapping[str, ast.Module]:
    files = (path for source in SOURCES for path in source.rglob("*.py"))
    return {str(path): ast.parse(path.read_text(encoding="utf-8")) for path in files}


def every_id() -> Iterator[str]:
    for name in topics():
        for key in topic(name):
            yield f"{name}.{key}"


@functools.cache
def of_templates() -> Mapping[str, str]:
    """Every id in a template, and the name of the template."""
    files = (path for source in SOURCES for path in source.rglob("*.html"))
    return {id: path.name for path in files for id in QUOTED.findall(path.read_text(encoding="utf-8"))}


def sections_of_templates() -> Iterator[str]:
    """Every section in a template: "pages.step." of `named("pages.step", ...)`."""
    for path in (path for source in SOURCES for path in source.rglob("*.html")):
        for section in re.findall(r"""named\(["']([\w.]+)["']""", path.read_text(encoding="utf-8")):
            yield f"{section}."


def called(node: ast.Call) -> str:
    """The name of what is called: "word" of `word(...)` and of `speaker.word(...)`."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def made() -> Iterator[tuple[str, ast.Call, str]]:
    """Every call that makes a sentence of an id that stands there: file, call, id."""
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and called(node) in MAKERS and node.args:
                id = node.args[0]
                if isinstance(id, ast.Constant) and isinstance(id.value, str) and "." in id.value:
                    yield path, node, id.value


@pytest.mark.parametrize("name", topics())
def test_a_topic_has_no_faults(name: str) -> None:
    files = [path for folder in _FOLDERS if (path := folder.joinpath(f"{name}.toml")).is_file()]
    found = [entry for path in files for entry in entries(tomllib.loads(path.read_text(encoding="utf-8")))]
    assert {key: list(faults(entry)) for key, entry in found if list(faults(entry))} == {}
    assert len({key for key, _ in found}) == len(found)  # no sentence stands in two folders


def test_every_sentence_that_is_made_is_in_the_catalogue_with_its_values() -> None:
    wrong, ids = [], set(every_id())
    for path, call, id in made():
        given = {keyword.arg for keyword in call.keywords}
        if id not in ids:
            wrong.append(f"{path}:{call.lineno}: {id} is not in the catalogue")
        elif None not in given and given != placeholders(catalogue_text(id).en):
            wrong.append(f"{path}:{call.lineno}: {id} has {placeholders(catalogue_text(id).en)}, and got {given}")
    wrong += [f"{name}: {id} is not in the catalogue" for id, name in of_templates().items() if id not in ids]
    assert not wrong, "\n".join(wrong)


def test_every_sentence_of_the_catalogue_is_made() -> None:
    named, prefixes = set(of_templates()), set(sections_of_templates())
    for tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named.add(node.value)
            if isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
                prefixes.add(str(node.values[0].value))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in SECTIONS:
                prefixes |= {f"{one.value}." for one in node.args[:1] if isinstance(one, ast.Constant)}
    starts = tuple(prefix for prefix in prefixes if prefix.partition(".")[0] in topics() and "." in prefix)
    assert [id for id in every_id() if id not in named and not id.startswith(starts)] == []


MESSAGE = Message("joins.brackets", first=Message("joins.same"), second=3)


def test_a_message_survives_pickle_copy_and_json() -> None:
    for twin in (
        pickle.loads(pickle.dumps(MESSAGE)),
        copy.deepcopy(MESSAGE),
        recorded(str(MESSAGE), *json.loads(json_document(fields(MESSAGE))).values()),
    ):
        assert (twin, twin.id, dict(twin.values)) == (str(MESSAGE), MESSAGE.id, dict(MESSAGE.values))
        assert twin.said("zh") == "相同（3）"


HOSTILE = {
    "no such id": ("joins.unknown", {}),
    "a path": ("../../../pyproject.tool", {}),
    "no text": (3, {}),
    "no values": ("joins.same", None),
    "other values": ("joins.brackets", {"first": "a"}),
    "a list": ("joins.brackets", {"first": ["a"], "second": "b"}),
    "a long value": ("joins.brackets", {"first": "a" * 20_001, "second": "b"}),
    "no sentence": ("joins.brackets", {"first": {"message": 3}, "second": "b"}),
}


@pytest.mark.parametrize("why", HOSTILE)
def test_a_record_that_does_not_fit_stays_the_text_that_it_holds(why: str) -> None:
    text = recorded("as it was said", *HOSTILE[why])
    assert (type(text), said(text, "zh")) == (str, "as it was said")


def test_a_small_record_does_not_become_a_long_text() -> None:
    id = max(every_id(), key=lambda id: catalogue_text(id).zh.count("{"))
    names = placeholders(catalogue_text(id).en)
    most = max(names, key=catalogue_text(id).zh.count)
    inner: dict[str, object] = {"message": "x", "message_id": id, "values": dict.fromkeys(names, "b" * 300)}
    for _ in range(12):
        inner = {"message": "x", "message_id": id, "values": dict.fromkeys(names, "b") | {most: inner}}
    assert len(said(recorded("x", inner["message_id"], inner["values"]), "zh")) <= 20_000


def test_values_are_never_read_as_templates() -> None:
    assert word("joins.brackets", "zh", first="{second}", second="{0.__class__}") == "{second}（{0.__class__}）"


def test_a_joined_sentence_is_said_in_each_language() -> None:
    assert joined(["q"], "and") == "q"
    three = joined([Message("joins.same"), "k", "v"])
    assert (three, said(three, "zh")) == ("the same; k; v", "相同；k；v")


def test_no_blank_stands_between_two_chinese_words() -> None:
    some = Message("paragraphs.sites.more", sites="h.0", count="2")
    assert said(Message("paragraphs.follow.many", sites=some), "zh") == "h.0 等，另有 2 处的差异"
    assert said(Message("paragraphs.follow.many", sites="h.0"), "zh") == "h.0 的差异"


def test_a_missing_value_is_an_error() -> None:
    with pytest.raises(KeyError, match="second"):
        Message("joins.brackets", first="a")

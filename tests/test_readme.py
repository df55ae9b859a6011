"""What sentences and tables of README and docs name is there: in Python after a bare import, and as a command."""

from __future__ import annotations

import builtins
import functools
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sqrtdk
from sqrtdk.impl.choice import IMPLEMENTATIONS
from sqrtdk.integrations import trainer
from sqrtdk.integrations.transformers import ATTENTION_NAME
from sqrtdk.laws import subject
from sqrtdk.tracing import steps
from tests.cli.commands import COMMANDS, PROGRAM

ROOT = Path(__file__).parents[1]
# sources.md quotes the code of others; its classes are looked up in tests/docs/test_sources_page.py
PAGES = [ROOT / "README.md", *sorted(set((ROOT / "docs" / "en").glob("*.md")) - {ROOT / "docs" / "en" / "sources.md"})]
TEXT = "\n\n".join(page.read_text(encoding="utf-8") for page in PAGES)
SENTENCES = re.sub(r"^```.*?^```$", "", TEXT, flags=re.MULTILINE | re.DOTALL)
CONSOLE = "\n".join(re.findall(r"^```console\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL))
QUOTED = [" ".join(text.split()) for text in re.findall(r"`([^`]+)`", SENTENCES)]

# One process that has imported sqrtdk and nothing of it; each name is looked up in a child of its own, as what one
# look-up imports would be there for the next.
LOOK_UP = """
import inspect, json, os, sys
import torch, sqrtdk
for path, arguments in json.loads(sys.stdin.read()):
    child = os.fork()
    if not child:
        thing, wrong = sqrtdk, ""
        try:
            for name in path.split(".")[1:]:
                thing = getattr(thing, name)
            known = inspect.signature(thing).parameters if arguments is not None else ()
            wrong = ", ".join(name for name in arguments or () if name not in known)
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        if wrong:
            print(f"{path}: {wrong}", flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def named_in_python() -> list[tuple[str, list[str] | None]]:
    """Dotted names, each with the names of the arguments that it is called with; None: it is not called."""
    found: dict[str, list[str] | None] = {}
    for text in QUOTED:
        match = re.fullmatch(r"(sqrtdk(?:\.\w+)+)(?:\((.*)\))?", text)
        if match:
            inside = match[2]
            called = None if inside is None else re.findall(r"(\w+)(?:=[^,]*)?(?:,|$)", inside)
            found[match[1]] = called or found.get(match[1]) or ([] if inside is not None else None)
    for namespace, names in re.findall(r"^\| `(sqrtdk\.\w+)` \| (.*) \|$", SENTENCES, re.MULTILINE):
        found |= {f"{namespace}.{name}": None for name in re.findall(r"`(\w+)`", names)}
    for paragraph in re.findall(r"^`(sqrtdk\.[a-z]\w*)` (.*?)\n\n", SENTENCES, re.MULTILINE | re.DOTALL):
        namespace, rest = paragraph
        found |= {f"{namespace}.{name}": None for name in re.findall(r"`([A-Z][a-z]+[A-Z]\w*)`", rest)}
    return list(found.items())


def test_every_name_is_there() -> None:
    for path, arguments in named_in_python():
        thing = functools.reduce(getattr, path.split(".")[1:], sqrtdk)
        assert set(arguments or ()) <= set(inspect.signature(thing).parameters if arguments else ()), path


@pytest.mark.full  # of the names that are listed first, test_house.py asks the same
def test_every_name_is_there_after_a_bare_import() -> None:
    names = named_in_python()
    done = subprocess.run(
        [sys.executable, "-c", LOOK_UP],
        input=json.dumps(names),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout == ""
    assert {"sqrtdk.report.json.to_json", "sqrtdk.check", "sqrtdk.scales.log_n", "sqrtdk.nn.TransformerBlock"} <= {
        name for name, _ in names
    }


@pytest.mark.parametrize("name", ["errors", "integrations", "report"])
def test_what_is_reachable_is_listed_and_costs_nothing_before(name: str) -> None:
    assert name in dir(sqrtdk)
    assert name not in sqrtdk.__all__
    code = f"import sys, sqrtdk; sqrtdk.{name}; print(sorted({{'torch', 'transformers', 'jinja2'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "[]\n"


def test_classes_are_ours_or_pythons() -> None:
    classes = {name for name in QUOTED if re.fullmatch(r"[A-Z][a-z]+[A-Z]\w+", name)}
    assert {"AuxRequest", "ValueError"} <= classes
    ours = (
        sqrtdk,
        sqrtdk.answers,
        sqrtdk.errors,
        sqrtdk.laws,
        subject,
        sqrtdk.nn,
        sqrtdk.scores,
        sqrtdk.stats,
        sqrtdk.tracing,
        steps,
        trainer,
    )
    assert [name for name in sorted(classes) if not any(hasattr(home, name) for home in (*ours, builtins))] == []


def _options(command: Any) -> set[str]:
    return {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}


VERBS = {tuple(path.split()): command for path, (command, _) in COMMANDS.items()} | {(): PROGRAM}
EVERYWHERE = {"--help", "-h"}


def test_every_command_is_there_with_its_options() -> None:
    lines = [line for line in CONSOLE.splitlines() if line.startswith("$ sqrtdk")]
    commands = [line.split("#")[0][2:].strip() for line in lines]
    commands += [text for text in QUOTED if re.match(r"sqrtdk [a-z]", text)]
    assert len(commands) > 15
    wrong = []
    for command in commands:
        words = command.split()[1:]
        path: tuple[str, ...] = ()
        while words and (*path, words[0]) in VERBS:
            path = (*path, words.pop(0))
        missing = {word for word in words if word.startswith("-")} - _options(VERBS[path]) - EVERYWHERE
        if path == () or missing:
            wrong.append((command, sorted(missing)))
    assert wrong == []


def test_every_option_is_one_of_some_command() -> None:
    of_others = {"--override-kv", "--sqrtdk-weak"}  # of llama.cpp, and of the pytest plugin
    known = set().union(*(_options(command) for command in VERBS.values())) | EVERYWHERE | of_others
    programs = ("python ", "torchrun ")  # they have options of their own
    quoted = [text for text in QUOTED if not text.startswith(programs)]
    named = {word for text in quoted for word in re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)}
    assert len(named) > 15
    assert named - known == set()


def test_every_value_of_an_argument_is_one() -> None:
    quoted = " ".join(QUOTED)
    named = set(re.findall(r'\bimpl="(\w+)"', quoted))
    assert named
    assert named <= {"auto", *IMPLEMENTATIONS}
    assert set(re.findall(r'attn_implementation="(\w+)"', quoted)) == {ATTENTION_NAME}

"""What the program says about itself, without torch."""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from sqrtdk import cli
from sqrtdk.cli.verbs import GROUPS, VERBS

PROGRAMS = {"script": ["sqrtdk"], "module": [sys.executable, "-m", "sqrtdk"]}
HEAVY = ("torch", "numpy", "transformers", "rich", "jinja2")


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("arguments", [["--help"], ["check", "--help"], ["--version"], ["check", "-h"], []])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        f"sys.argv = ['sqrtdk', *{arguments!r}]\n"
        "from sqrtdk.cli import main\n"
        "try:\n    main()\n"
        f"finally:\n    print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)\n"
    )
    done = _run(sys.executable, "-c", code)
    assert done.stderr.strip().splitlines()[-1] == "[]"
    assert "sqrtdk" in done.stdout + done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["check", "--help"], ["--version"], ["check", "--seq-len", "0"]])
def test_both_entries_are_one_program(arguments: list[str]) -> None:
    script, module = (_run(*program, *arguments) for program in PROGRAMS.values())
    assert (script.returncode, script.stdout, script.stderr) == (module.returncode, module.stdout, module.stderr)


def test_version() -> None:
    done = _run("sqrtdk", "--version")
    assert done.returncode == 0
    assert done.stdout.startswith("sqrtdk ")


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "--batch", "0"],
        ["check", "--seq-len", "x"],
        ["check", "--attn", "flash"],
        ["check", "--fail-on", "sometimes"],
        ["check", "--no-such-option"],
        ["check", "demo", "demo"],
        ["chekc"],
    ],
)
def test_usage_errors_exit_2_without_a_traceback(arguments: list[str]) -> None:
    done = _run("sqrtdk", *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Error:" in done.stderr
    assert "Traceback" not in done.stderr


def test_every_option_of_the_contract_is_there() -> None:
    text = _run("sqrtdk", "check", "--help").stdout
    options = "static attn text input batch seq-len device dtype seed revision trust-remote-code device-map"
    options += " offload-folder json html output force fail-on"
    missing = [name for name in options.split() if f"--{name} " not in text]
    assert not missing


def test_help_says_what_both_attentions_list() -> None:
    text = " ".join(_run("sqrtdk", "check", "--help").stdout.split())
    assert "both lists the calls of eager, then those of sdpa" in text


def test_help_names_what_is_allowed() -> None:
    text = " ".join(_run("sqrtdk", "check", "--help").stdout.split())
    for words in (
        "float32 (fp32), bfloat16 (bf16), float16 (fp16) or float64 (fp64)",
        "cpu, cuda, cuda:1, mps",
        "<eager|sdpa|both>",
        "note|warn|unmeasured|",
        "x>=1]",
        "e.g. auto",
    ):
        assert words in text, words


def _commands(command: Any, context: Any) -> Iterator[tuple[str, Any, Any]]:
    """Every group and verb with its path, "lab run", its command and a context to ask it in."""
    for name in command.list_commands(context):
        child = command.get_command(context, name)
        inner = child.context_class(child, info_name=name, parent=context)
        yield inner.command_path.removeprefix("sqrtdk "), child, inner
        if hasattr(child, "list_commands"):
            yield from _commands(child, inner)


PROGRAM: Any = typer.main.get_command(cli._app)
COMMANDS = {
    path: (command, context)
    for path, command, context in _commands(PROGRAM, PROGRAM.context_class(PROGRAM, info_name="sqrtdk"))
}
EVERY = {path: found for path, found in COMMANDS.items() if not hasattr(found[0], "list_commands")}
LISTED = VERBS | GROUPS


def test_every_verb_and_every_group_has_examples() -> None:
    assert list(EVERY) == list(VERBS)
    assert [path for path in COMMANDS if path not in EVERY] == list(GROUPS)
    assert all(one.examples for one in LISTED.values())


@pytest.mark.parametrize("columns", [80, 60])
@pytest.mark.parametrize("path", COMMANDS)
def test_examples_stand_in_the_help_as_they_are_typed(path: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    command, context = COMMANDS[path]
    lines = command.get_help(type(context)(command, info_name=context.info_name, parent=context.parent)).splitlines()
    head = lines.index("  Examples:")
    assert lines[head + 1 :] == [f"    {example}" for example in LISTED[path].examples]
    assert max(map(len, lines[head:])) <= 80
    assert max(map(len, lines[:head])) <= columns


@pytest.mark.parametrize("path", COMMANDS)
def test_the_commands_take_their_examples(path: str) -> None:
    for example in LISTED[path].examples:
        assert example.startswith(f"sqrtdk {path}")
        (verb,) = (verb for verb in EVERY if f"{example} ".startswith(f"sqrtdk {verb} "))
        command, context = EVERY[verb]
        words = shlex.split(example.removeprefix(f"sqrtdk {verb}"), comments=True)
        assert not command.make_context(context.info_name, words, parent=context.parent).args


@pytest.mark.parametrize("path", EVERY)
def test_help_shows_defaults_and_names_that_a_user_reads(path: str) -> None:
    command, context = EVERY[path]
    for parameter in command.get_params(context):
        name, text = parameter.get_help_record(context)
        takes_value = parameter.param_type_name == "option" and not parameter.is_flag
        if takes_value and not text.startswith("Write "):  # what is written only where it is asked for
            assert "[default: " in text or "required]" in text, (path, name)
        if takes_value and not parameter.type_descriptor.is_choice:
            assert name.rpartition(" ")[2].strip(":").isupper() or ":" in name, (path, name)
    shown = command.get_help(context)
    assert "{" not in shown.partition("\n")[0]
    for riddle in ("range>", "<str>", "<path>", "<int>", "<list", "default: ("):
        assert riddle not in shown, path


def test_the_list_of_verbs_is_not_cut() -> None:
    for group in ([], *([name] for name in GROUPS)):
        assert "..." not in _run("sqrtdk", *group, "--help").stdout.partition("Commands:")[2]


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (
            ["record", "demo"],
            "Hint: for example: sqrtdk record demo --output trace.safetensors; all options: sqrtdk record --help",
        ),
        (["diff"], "Hint: for example: sqrtdk diff demo demo:unscaled; all options: sqrtdk diff --help"),
        (["lab", "shw"], "Hint: all options: sqrtdk lab --help"),
        (
            ["check", "demo", "--html"],
            "Hint: for example: sqrtdk check demo:unscaled; all options: sqrtdk check --help",
        ),
        (
            ["watch", "show", "-f", "--statistic"],
            "Hint: for example: sqrtdk watch show runs/a; all options: sqrtdk watch show --help",
        ),
    ],
)
def test_a_usage_error_has_a_hint(arguments: list[str], hint: str) -> None:
    done = _run("sqrtdk", *arguments)
    assert done.returncode == 2
    error, told = done.stderr.splitlines()
    assert error.startswith(("Error: Missing ", "Error: No such command", "Error: Option "))
    assert told == hint


@pytest.mark.parametrize("name", GROUPS)
def test_a_group_without_a_verb_shows_its_help(name: str) -> None:
    done, asked, short = (_run("sqrtdk", name, *option) for option in ([], ["--help"], ["-h"]))
    assert done.returncode == 2
    assert done.stderr.startswith(f"Usage: sqrtdk {name} ")
    assert "Examples:" in done.stderr
    assert done.stderr == asked.stdout == short.stdout


def test_bash_completes_verbs_options_and_values(tmp_path: Path) -> None:
    script = """
sqrtdk --install-completion bash >/dev/null && source ~/.bashrc
complete_words() {
    COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
    "$(complete -p sqrtdk | sed 's/.*-F \\([^ ]*\\) .*/\\1/')" sqrtdk
    echo "${COMPREPLY[*]}"
}
complete_words sqrtdk che
complete_words sqrtdk check --fail-
complete_words sqrtdk check --attn ''
complete_words sqrtdk lab r
"""
    environment = os.environ | {"HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = subprocess.run(
        ["bash", "--norc", "-c", script], capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert done.stdout.splitlines() == ["check", "--fail-on", "eager sdpa both", "run report"], done.stderr

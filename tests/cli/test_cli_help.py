"""What the program says about itself, without torch."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from sqrtdk.audit.records import FAIL_ON as AUDIT
from sqrtdk.cli import verbs
from sqrtdk.cli.help import help_row
from sqrtdk.compare.records import DIFF_FAIL_ON as DIFF
from tests.cli.commands import COMMANDS, EVERY
from tests.support.lab_here import LAB
from tests.support.program import called

SCRIPT = Path(sys.executable).with_name("sqrtdk")
PROGRAMS = ([str(SCRIPT)], [sys.executable, "-m", "sqrtdk"])
LIGHT = ("--help", "--version", "check -h", "", "chekc", "watch", *(f"{verb} --help" for verb in EVERY))
HEAVY = ("torch", "numpy", "transformers", "rich", "jinja2")
EXAMPLES = dict(verbs.EXAMPLES)
if LAB:
    from sqrtdk_lab.cli import EXAMPLES as OF_LAB

    EXAMPLES |= {path: examples for path, examples in OF_LAB.items() if examples}
GROUPS = [path for path in COMMANDS if path not in EVERY]


def test_every_verb_and_every_group_has_examples() -> None:
    assert set(EXAMPLES) == {"sqrtdk", *COMMANDS}
    assert all(EXAMPLES.values())


@pytest.mark.parametrize("columns", [80, 60])
@pytest.mark.parametrize("path", COMMANDS)
def test_examples_stand_in_the_help_as_they_are_typed(path: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    command, context = COMMANDS[path]
    lines = command.get_help(type(context)(command, info_name=context.info_name, parent=context.parent)).splitlines()
    head = lines.index("  Examples:")
    assert len(lines[head + 1 :]) == len(EXAMPLES[path])
    for line, (typed, remark) in zip(lines[head + 1 :], EXAMPLES[path].items(), strict=True):
        assert line.startswith(f"    {typed}")
        assert ("# " in line) is bool(remark)
    assert max(map(len, lines[head:])) <= 80
    assert max(map(len, lines[:head])) <= columns


@pytest.mark.parametrize("path", COMMANDS)
def test_the_commands_take_their_examples(path: str) -> None:
    for example in EXAMPLES[path]:
        assert example.startswith(f"sqrtdk {path}")
        (verb,) = (verb for verb in EVERY if f"{example} ".startswith(f"sqrtdk {verb} "))
        command, context = EVERY[verb]
        words = shlex.split(example.removeprefix(f"sqrtdk {verb}"), comments=True)
        assert not command.make_context(context.info_name, words, parent=context.parent).args


@pytest.mark.parametrize("path", EVERY)
def test_help_shows_defaults_and_names_that_a_user_reads(path: str) -> None:
    command, context = EVERY[path]
    for parameter in command.get_params(context):
        name, text = help_row(parameter, context)
        takes_value = parameter.param_type_name == "option" and not parameter.is_flag
        if takes_value and not text.startswith("Write "):  # what is written only where it is asked for
            assert "[default: " in text or "required]" in text, (path, name)
        if takes_value and not parameter.type_descriptor.is_choice:
            assert name.rpartition(" ")[2].strip(":").isupper() or ":" in name, (path, name)
    shown = command.get_help(context)
    assert "{" not in shown.partition("\n")[0]
    for riddle in ("range>", "<str>", "<path>", "<int>", "<list", "default: ("):
        assert riddle not in shown, path


def test_help_and_usage_errors_import_nothing_heavy() -> None:
    code = (
        "import contextlib, io, json, sys\nfrom sqrtdk.cli import _exit_code\ntold = {}\n"
        f"for line in {LIGHT!r}:\n"
        "    sys.argv = ['sqrtdk', *line.split()]\n    text = io.StringIO()\n"
        "    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):\n        _exit_code()\n"
        "    told[line] = text.getvalue()\n"
        f"print(json.dumps([[name for name in {HEAVY!r} if name in sys.modules], told]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    heavy, told = json.loads(done.stdout)
    assert heavy == []
    assert [line for line, text in told.items() if "sqrtdk" not in text] == []


@pytest.mark.parametrize("line", ["--version", "check --seq-len 0"])
def test_both_entries_are_one_program_and_a_call_in_this_process_is_too(line: str) -> None:
    for program in PROGRAMS:
        done = subprocess.run([*program, *line.split()], capture_output=True, text=True, timeout=300, check=False)
        here = called(*line.split())
        assert (done.returncode, done.stdout, done.stderr) == (here.returncode, here.stdout, here.stderr)
        assert "sqrtdk " in done.stdout + done.stderr


def test_the_help_of_check_has_every_option_of_the_contract_and_what_is_allowed() -> None:
    text = called("check", "--help").stdout
    options = "static attn text input batch seq-len device dtype seed revision trust-remote-code device-map"
    options += " offload-folder json html output force fail-on"
    assert [name for name in options.split() if f"--{name} " not in text] == []
    text = " ".join(text.split())
    for words in (
        "both lists the calls of eager, then those of sdpa",
        "float32 (fp32), bfloat16 (bf16), float16 (fp16) or float64 (fp64)",
        "cpu, cuda, cuda:1, mps",
        "<eager|sdpa|both>",
        "note|warn|unmeasured|",
        "x>=1]",
        "e.g. auto",
    ):
        assert words in text, words


@pytest.mark.parametrize("name", ["", *GROUPS])
def test_a_group_without_a_verb_shows_its_help_whose_list_is_not_cut(name: str) -> None:
    done, asked, short = (called(*name.split(), *option) for option in ([], ["--help"], ["-h"]))
    assert done.returncode == 2
    assert done.stderr.startswith(f"Usage: sqrtdk {name}".rstrip())
    assert "Examples:" in done.stderr
    assert done.stderr == asked.stdout == short.stdout
    assert "..." not in asked.stdout.partition("Commands:")[2]


def test_bash_completes_verbs_options_and_values(tmp_path: Path) -> None:
    script = """
sqrtdk --install-completion bash >/dev/null && source ~/.bashrc
complete_words() {
    COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
    "$(complete -p sqrtdk | sed 's/.*-F \\([^ ]*\\) .*/\\1/')" sqrtdk
    echo "${COMPREPLY[*]}"
}
complete_words sqrtdk check --fail-
complete_words sqrtdk check --attn ''
complete_words sqrtdk watch s
"""
    environment = os.environ | {"HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    environment["PATH"] = f"{SCRIPT.parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "--norc", "-c", script], capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert done.stdout.splitlines() == ["--fail-on", "eager sdpa both", "show"], done.stderr


def test_the_bars_are_those_of_the_records() -> None:
    for path, bars in {
        "check": AUDIT,
        "kv": AUDIT,
        "watch show": AUDIT,
        "diff": DIFF,
    }.items():
        (option,) = (one for one in EVERY[path][0].params if one.name == "fail_on")
        assert option.type_descriptor.choices == bars, path

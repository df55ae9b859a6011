"""What goes wrong is told in two lines and exit code 2, whatever was typed: no traceback, and nothing is written."""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sqrtdk import cli
from sqrtdk.cli import output
from sqrtdk.cli.errors import reported
from sqrtdk.cli.guesses import GUESSED_OPTIONS, GUESSED_VERBS, NEW_SPELLINGS
from sqrtdk.errors import ModelError
from tests.cli.commands import EVERY
from tests.cli.errors import check_error
from tests.support.lab_here import of_installed
from tests.support.program import called

WATCH = "watch checkpoints . --output run --seq-len 12"
REFUSED = {  # a command line: a part of the error, and one of its hint
    "bench --list": ("No such command 'bench'", "make bench"),
    "app report.json": ("unexpected extra argument", "of a check is written by sqrtdk check MODEL --html FILE"),
    "check demo:nope": ("demo:nope", ""),
    "check demo:thrice": ("demo:thrice", ""),
    "check no-such-org/no-such-model": ("no-such-org/no-such-model", ""),
    "check ./no-such-directory": ("there is no directory", ""),
    "check 'what is this?'": ("neither a hub id", ""),
    "check no_such_module_x:factory": ("no_such_module_x", ""),
    "check demo --dtype float13": ("float13", ""),
    "check demo --device quantum": ("quantum", ""),
    "check demo --text no-such-file": ("no-such-file", ""),
    "check demo --text /dev/zero": ("not a regular file", ""),
    "check demo --input no-such.safetensors": ("no-such.safetensors", ""),
    "check demo --input in.pt": ("not a .safetensors file", ""),
    "check demo --html no-such-directory/r.html": ("no-such-directory", ""),
    "check demo --output x --html x": ("two reports would be written to x", ""),
    "check demo --batch 100000000 --seq-len 1000000": ("elements", ""),
    f"check demo --seed {2**64}": ("seed", ""),
    "check demo --device-map auto": ("device_map", ""),
    "check demo --batch 0": ("Invalid value for '--batch'", "sqrtdk check --help"),
    "check demo --seq-len x": ("Invalid value for '--seq-len'", "sqrtdk check --help"),
    "check demo --attn flash": ("'flash' is not one of 'eager', 'sdpa', 'both'", "sqrtdk check --help"),
    "check demo --fail-on sometimes": ("'--fail-on': 'sometimes' is not one of 'note'", "sqrtdk check --help"),
    "check demo --no-such-option": ("No such option", "sqrtdk check --help"),
    # `sqrtdk check $MODEL` with an empty variable must not pass
    "check": ("Missing argument 'MODEL'", "for example: sqrtdk check demo; all options: sqrtdk check --help"),
    "check --static": ("Missing argument 'MODEL'", "for example: sqrtdk check demo; all options: sqrtdk check --help"),
    "check ''": ("'' is neither a hub id", "or demo"),
    "check demo --json r.json": ("--json takes no file; got r.json", "--json > FILE"),
    "diff demo demo --json r.json --html r.html": ("--json takes no file; got r.json", "--output FILE"),
    "check demo --update": ("--update given without --baseline", "--baseline FILE --update"),
    "check demo --baseline b.json": (
        "the baseline 'b.json' can't be read",
        "sqrtdk check demo --baseline b.json --update",
    ),
    "check no_such_module_x:make --baseline b.json": ("the baseline 'b.json' can't be read", "--update"),  # told first
    "check demo --baseline b.json --junit j.xml": ("--junit given with --baseline", "sqrtdk check --help"),
    "check demo --baseline b.json --update --fail-on warn": (
        "--fail-on warn given with --update",
        "sqrtdk check --help",
    ),
    "check demo --baseline no/b.json --update": ("there is no directory no", ""),
    "kv": ("Missing ", "for example: sqrtdk kv demo; all options: sqrtdk kv --help"),
    "kv demo --cache-dtype int3": ("'int3' is not one of 'fp8_e4m3'", "sqrtdk kv --help"),
    "kv demo --dtype int4": ("there is no dtype 'int4'", "sqrtdk kv MODEL --cache-dtype FORMAT"),
    "kv demo --cache-scale head": ("--cache-scale head given without", "--cache-dtype int8 --cache-scale head"),
    "check demo --html": ("Option ", "for example: sqrtdk check demo; all options: sqrtdk check --help"),
    "check demo --html --json": ("'--html': --json is an option itself; the value was left out", "sqrtdk check --help"),
    "chekc": ("No such command", "all options: sqrtdk --help"),
    "./my-model": ("No such command './my-model'", "a model is checked by: sqrtdk check MODEL"),
    "watch shwo": ("Did you mean 'show'?", "all options: sqrtdk watch --help"),
    "watch demo": ("No such command 'demo'.", "by sqrtdk.watch(model, to="),
    "check demo --format json": ("No such option: --format", "each document has an option of its own: --json"),
    "check demo --json-out r.json": ("No such option: --json-out", "into a file with --output FILE"),
    "diff demo demo --atol 1e-3": ("No such option: --atol", "there is no tolerance to set"),
    "diff": ("Missing ", "for example: sqrtdk diff demo demo:unscaled; all options: sqrtdk diff --help"),
    "diff demo": ("Missing ", "sqrtdk diff --help"),
    "diff demo demo demo": ("unexpected extra argument", "sqrtdk diff --help"),
    "diff demo demo --b attn=flash": ("--b attn=flash is no option of one side", "attn=eager|sdpa, dtype=DTYPE"),
    "diff demo demo --a attn_implementation=eager": ("is no option of one side", "It is written --a attn=eager"),
    "diff demo demo --b torch_dtype=bf16": ("is no option of one side", "It is written --b dtype=bf16"),
    "diff demo demo --a batch=2": ("--a batch=2 is no option of one side", "device=DEVICE, revision=NAME"),
    "diff demo demo --a eager": ("--a eager is no option of one side", "attn=eager|sdpa"),
    "diff demo demo --a dtype=": ("--a dtype= is no option of one side", "attn=eager|sdpa"),
    "diff demo demo --a dtype=bf16 --a dtype=fp16": ("--a dtype=fp16 is the second value", "given once"),
    "diff demo demo --fail-on fail": ("'fail' is not one of", "sqrtdk diff --help"),
    "diff demo demo --b dtype=int8": ("B: there is no dtype 'int8' to run a model in", ""),
    "diff demo demo --map nowhere.json": ("the map nowhere.json can't be read", ""),
    "diff demo demo --input nowhere.safetensors": ("nowhere.safetensors", ""),
    "diff demo demo --output here.json --html here.json": ("two reports would be written to here.json", ""),
    "diff demo demo --output no/where/r.json": ("there is no directory no/where", ""),
    "lab run entropy-tabel": ("there is no claim 'entropy-tabel'", "entropy-table"),
    "lab run onehot-64 --seed -1": ("--seed", ""),
    "lab run normal --output /proc/nowhere": ("cannot make the directory /proc/nowhere", "another directory"),
    "lab show var-liner": ("there is no claim 'var-liner'", "var-linear"),
    "lab show all": ("one claim can be shown; got 'all'", "lab list"),
    "lab report /proc": ("/proc holds no records", "sqrtdk lab run"),
    "lab report nowhere": ("nowhere holds no records", "sqrtdk lab run"),
    "lab shw": ("No such command", "all options: sqrtdk lab --help"),
    "params a b": ("unexpected extra argument", "sqrtdk params --help"),
    "params gpt5": ("gpt5", "The presets are gpt2, gpt2-medium"),
    "params org/none": ("org/none", ""),
    "params ./none": ("there is no directory", ""),
    "params zoo.py:make": ("", "Name the module"),
    "params demo:nope": ("demo:nope", ""),
    "record demo": (
        "Missing ",
        "for example: sqrtdk record demo --output trace.safetensors; all options: sqrtdk record --help",
    ),
    "watch show /proc": ("holds no run", "run.json and parts/"),
    "watch report runs/a": ("No such command", "it is now: sqrtdk watch show RUN --html FILE"),
    "watch show nowhere --serve 0": ("holds no run", "run.json"),
    "watch show nowhere --serve 70000": ("--serve", "sqrtdk watch show --help"),
    "watch show nowhere --serve 0 --follow": ("makes no document", "are two calls"),
    "watch compare nowhere nowhere": ("holds no run", "run.json"),
    "watch show nowhere --statistic max_logits": ("there is no statistic 'max_logits'", "max_logit"),
    "watch show nowhere --statistic ,": ("no statistic is named", "max_logit, "),
    "watch show nowhere --follow": ("holds no run", "run.json"),
    "watch show nowhere --follow --json": ("--follow shows a run while it is written", "Leave out"),
    "watch show -f --statistic": ("Option ", "sqrtdk watch show runs/a; all options: sqrtdk watch show --help"),
    "watch checkpoints nowhere": ("--output", "sqrtdk watch checkpoints --help"),
    "watch checkpoints 'nowhere/*' --output run": ("no checkpoint matches 'nowhere/*'", "runs/*/checkpoint-*"),
    f"{WATCH} --statistic peaks": ("there is no statistic 'peaks'", "max_logit"),
    f"{WATCH} --html no/page.html": ("there is no directory no", "Create"),
    f"{WATCH} --ray-address auto": ("an address is for the engine 'ray'", "Leave it out"),
    f"{WATCH} --dtype int3": ("there is no dtype 'int3'", "float32"),
    f"{WATCH} --input ids.bin": ("ids.bin", ""),
    f"{WATCH} --engine rai": ("--engine", "sqrtdk watch checkpoints --help"),
    f"{WATCH} --rows 1": ("--rows", "sqrtdk watch checkpoints --help"),
    f"{WATCH} --workers 0": ("--workers", "sqrtdk watch checkpoints --help"),
    f"{WATCH} --attn both": ("--attn", "sqrtdk watch checkpoints --help"),
}


@pytest.mark.parametrize("command", of_installed(REFUSED))
def test_what_is_wrong_is_told_and_nothing_is_written(command: str, tmp_path: Path) -> None:
    check_error(called(*shlex.split(command), cwd=tmp_path), *REFUSED[command])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("old", NEW_SPELLINGS)
def test_an_old_spelling_says_the_new_one(old: str, tmp_path: Path) -> None:
    """Alone, and with what stood around it; the new one is a command that there is, with these options."""
    option = old.rpartition(" ")[2]
    for words in ([*old.split(), "x"], [*old.split()[:-1], "demo", option, "x"] if option.startswith("--") else []):
        if words:
            check_error(called(*words, cwd=tmp_path), "No such ", f"it is now: {NEW_SPELLINGS[old]}")
    chinese = called(*old.split(), "x", "--lang", "zh-CN", cwd=tmp_path)
    assert f"现在的写法：{NEW_SPELLINGS[old]}" in chinese.stderr
    words = NEW_SPELLINGS[old].split()[1:]
    verb = next(name for name in (" ".join(words[:2]), words[0]) if name in EVERY)
    flags = {flag for parameter in EVERY[verb][0].params for flag in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= flags


@pytest.mark.parametrize("guess", GUESSED_VERBS)
def test_a_guessed_verb_leads_to_one_that_there_is(guess: str, tmp_path: Path) -> None:
    refused = called(*guess.split(), "demo", cwd=tmp_path)
    check_error(refused, f"No such command '{guess.split()[0]}'.")
    hint = refused.stderr.partition("Hint: ")[2]
    commands = re.findall(r"sqrtdk (\w+ \w+|\w+)", hint)
    assert commands or guess == "bench", hint
    for command in commands:
        path = command if command in EVERY else command.partition(" ")[0]
        flags = {flag for parameter in EVERY[path][0].params for flag in parameter.opts}
        assert set(re.findall(r"--[a-z-]+", hint)) <= flags or len(commands) > 1


@pytest.mark.parametrize(
    ("verb", "guess"), [(verb, guess) for verb, words in GUESSED_OPTIONS.items() for guess in words]
)
def test_a_guessed_option_leads_to_one_that_the_verb_has(verb: str, guess: str, tmp_path: Path) -> None:
    models = ["demo", "demo"][: 1 + (verb == "diff")]
    refused = called(verb, *models, guess, "x", cwd=tmp_path)
    check_error(refused, f"No such option: {guess}")
    options = re.findall(r"--[a-z-]+", refused.stderr.partition("Hint: ")[2])
    assert options or GUESSED_OPTIONS[verb][guess] in ("no_tolerance", "model")
    assert set(options) <= {flag for parameter in EVERY[verb][0].params for flag in parameter.opts}


CHOICES = {  # of an option that takes any text
    "device": ["cpu", "meta"], "dtype": ["float32", "bf16", "fp16", "float64"],
    "models": ["demo", "demo:unscaled", "demo:twice", "demo:inverted"],
}  # fmt: skip
SMALL = {"batch": 2, "seq_len": 6, "seed": 2**32}


def values(parameter: Any) -> st.SearchStrategy[list[str]]:
    """Words that are right for an option or an argument."""
    name = parameter.name
    if parameter.param_type_name == "argument":
        return st.sampled_from(CHOICES[name]).map(lambda value: [value])
    flag = max(parameter.opts, key=len)
    if parameter.is_flag:
        return st.just([flag])
    if name in SMALL:
        return st.integers(1, SMALL[name]).map(lambda value: [flag, str(value)])
    choices = CHOICES.get(name) or list(parameter.type_descriptor.choices)
    return st.sampled_from(choices).map(lambda value: [flag, value])


def combinations(verb: str) -> st.SearchStrategy[list[str]]:
    """Any options of a verb that write no file and need none, in any order."""
    parameters = [
        parameter
        for parameter in EVERY[verb][0].params
        if parameter.param_type_name == "option"
        and (
            parameter.name in CHOICES.keys() | SMALL
            or getattr(parameter, "is_flag", False)
            or parameter.type_descriptor.is_choice
        )
    ]
    chosen = st.lists(st.sampled_from(parameters), unique_by=lambda parameter: parameter.name, max_size=6)
    return chosen.flatmap(lambda some: st.tuples(*map(values, some))).map(lambda words: [*chain(*words)])


@settings(max_examples=25, deadline=None)
@given(combinations("check"))
def test_any_valid_options_of_a_check_end_well(words: list[str]) -> None:
    assume("--help" not in words)
    done = called("check", "demo", "--seq-len", "6", *words)
    assert "Traceback" not in done.stderr or "--traceback" in words
    assert "is not one of sqrtdk's own" not in done.stderr, done.stderr
    assert done.returncode in (0, 1, 2)
    if done.returncode == 2:
        assert done.stdout == ""
        assert re.search("Error: |错误：", done.stderr)
        assert re.search("\nHint: |\n提示：", done.stderr)
    else:
        assert f"xit code {done.returncode}" in done.stdout + done.stderr or f"退出码 {done.returncode}" in (
            done.stdout + done.stderr
        )


VALUED = [
    (path, parameter)
    for path, (command, _) in EVERY.items()
    for parameter in command.params
    if parameter.param_type_name == "option" and not parameter.is_flag
    if parameter.type_descriptor.is_choice or parameter.type_descriptor.annotation in (int, float)
]


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(VALUED), st.text(min_size=1, max_size=20))
def test_an_invalid_value_of_any_option_is_a_usage_error(option: tuple[str, Any], text: str) -> None:
    path, parameter = option
    with contextlib.suppress(ValueError):
        float(text)
        assume(False)
    assume(text not in (parameter.type_descriptor.choices or ()))
    flag = max(parameter.opts, key=len)
    check_error(called(*path.split(), f"{flag}={text}"), f"Invalid value for '{flag}'", f"sqrtdk {path} --help")


def _raised(error: BaseException, traceback: bool = False) -> int:
    with pytest.raises(typer.Exit) as caught, reported(traceback):
        raise error
    return caught.value.exit_code


def test_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert _raised(ModelError("no such model", hint="name one")) == 2
    assert capsys.readouterr().err == "Error: no such model\nHint: name one\n"


class Own(BaseException):
    pass


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ZeroDivisionError("division by zero"), "Error: ZeroDivisionError: division by zero"),
        (SystemExit(0), "Error: SystemExit: 0"),
        (Own("stop"), "Error: Own: stop"),
        (Mute(), "Error: Mute: (its text can't be shown: RuntimeError)"),
    ],
)
@pytest.mark.parametrize("asked", ["", "option", "variable"])
def test_an_unexpected_one_names_its_type_and_how_to_see_more(
    error: BaseException, line: str, asked: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A traceback that is shown is not hinted at."""
    if asked == "variable":
        monkeypatch.setenv("SQRTDK_TRACEBACK", "1")
    assert _raised(error, traceback=asked == "option") == 2
    *traceback, first, hint = capsys.readouterr().err.splitlines()
    assert first == line
    assert hint.startswith("Hint: this error is not one of sqrtdk's own")
    assert ("Traceback (most recent call last):" in traceback) is bool(asked)
    for way in ("--traceback", "SQRTDK_TRACEBACK=1"):
        assert (way in hint) is not asked


def test_the_variable_shows_the_traceback_of_an_error_outside_a_verb(monkeypatch: pytest.MonkeyPatch) -> None:
    def unwired(**_: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(cli, "_app", unwired)
    done = called()
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    done = called(SQRTDK_TRACEBACK="1")
    assert done.returncode == 2
    assert "in unwired" in done.stderr
    assert "SQRTDK_TRACEBACK" not in done.stderr


def test_interrupted(capsys: pytest.CaptureFixture[str]) -> None:
    assert _raised(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "Interrupted.\n"


def test_an_error_cannot_command_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    _raised(ModelError("bad \x1b[2J\u202e", hint="\x07"))
    assert capsys.readouterr().err == "Error: bad \\x1b[2J\\u202e\nHint: \\x07\n"


def test_long_messages_are_cut(capsys: pytest.CaptureFixture[str]) -> None:
    _raised(ValueError("\n".join(map(str, range(100)))))
    assert len(capsys.readouterr().err.splitlines()) == 14


def test_a_result_passes() -> None:
    with reported(False):
        result = 1
    assert result == 1


def test_pipes_are_wide_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert output.width() == output.PIPE_WIDTH
    monkeypatch.setenv("COLUMNS", "72")
    assert output.width() == 72


def test_no_spinner_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    with output.working("Checking"):
        print("from the model")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "from the model\n"
    print("after", file=sys.stdout)
    assert capsys.readouterr().out == "after\n"

import sys

import pytest
import typer

from sqrtdk import cli
from sqrtdk.cli import output
from sqrtdk.cli.errors import reported
from sqrtdk.errors import ModelError


def _raised(error: BaseException, traceback: bool = False) -> int:
    with pytest.raises(typer.Exit) as caught, reported(traceback):
        raise error
    return caught.value.exit_code


def test_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert _raised(ModelError("no such model", hint="name one")) == 2
    assert capsys.readouterr().err == "Error: no such model\nHint: name one\n"


def test_unexpected_names_the_type_and_how_to_see_more(capsys: pytest.CaptureFixture[str]) -> None:
    assert _raised(ZeroDivisionError("division by zero")) == 2
    error = capsys.readouterr().err
    assert error.startswith("Error: ZeroDivisionError: division by zero\nHint: ")
    assert "--traceback" in error
    assert "SQRTDK_TRACEBACK=1" in error


@pytest.mark.parametrize("asked", ["option", "variable"])
def test_a_traceback_that_is_shown_is_not_hinted_at(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    if asked == "variable":
        monkeypatch.setenv("SQRTDK_TRACEBACK", "1")
    assert _raised(ZeroDivisionError("division by zero"), traceback=asked == "option") == 2
    error = capsys.readouterr().err
    assert "Traceback (most recent call last)" in error
    assert "Hint: this error is not one of sqrtdk's own." in error.splitlines()
    assert "--traceback" not in error
    assert "SQRTDK_TRACEBACK" not in error


def test_the_variable_shows_the_traceback_of_an_error_outside_a_verb(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unwired() -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(cli, "_app", lambda **_: unwired())
    assert cli._exit_code() == 2
    assert "Traceback" not in capsys.readouterr().err
    monkeypatch.setenv("SQRTDK_TRACEBACK", "1")
    assert cli._exit_code() == 2
    error = capsys.readouterr().err
    assert "in unwired" in error
    assert "SQRTDK_TRACEBACK" not in error


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


def test_a_choice_that_is_none_is_told_in_plain_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["sqrtdk", "check", "demo", "--fail-on", "sometimes"])
    assert cli._exit_code() == 2
    assert capsys.readouterr().err.startswith("Error: Invalid value for '--fail-on': 'sometimes' is not one of 'note'")

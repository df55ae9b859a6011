"""Help, errors and what is told while a verb runs, in Chinese: the same options, and no English sentence."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

import sqrtdk
from sqrtdk.cli.errors import _TYPERS_WORDS
from sqrtdk.errors import SqrtdkError
from sqrtdk.messages import Message
from tests.cli.commands import COMMANDS
from tests.cli.test_cli_errors import REFUSED
from tests.support.program import called

SOURCE = Path(sqrtdk.__file__).parent
HAN = re.compile("[一-鿿]")
ENGLISH = re.compile(r"\b[A-Za-z][a-z']+ [a-z][a-z']+ [a-z]+")  # three words: a command is shorter
COMMAND = re.compile(r"`[^`]*`|'[^']*'|(?:sqrtdk|pip|python|hf|make)(?: [\w\-./:*'\[\]{}=,]+)+")
TITLE = re.compile("^(?:Arguments:|Options:|参数：|选项：)", re.MULTILINE)
TELLS = ("tell_reader", "report_progress", "working", "counting")


def english(text: str) -> list[str]:
    """What reads as English in a text, but for the commands in it."""
    return ENGLISH.findall(COMMAND.sub("", text))


def names(text: str) -> list[str]:
    """The options and arguments that a help text lists."""
    return re.findall(r"^  (-\S.*?|[A-Z]+(?:\.\.\.)?)(?:  |$)", text[TITLE.search(text).start() :], re.MULTILINE)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("path", ["", *COMMANDS])
def test_help_in_chinese_lists_the_same_and_has_no_english_sentence(path: str) -> None:
    in_english, in_chinese = (called(*path.split(), "--help", LANG=lang, LC_ALL="") for lang in ("C", "zh_CN.UTF-8"))
    assert names(in_chinese.stdout) == names(in_english.stdout) != []
    before_examples = in_chinese.stdout.partition("示例：")[0]
    assert english(before_examples) == []
    for line in before_examples.splitlines():
        assert sum(2 if HAN.match(letter) else 1 for letter in line) <= 80


@pytest.mark.parametrize(
    "words",
    ["check --help --lang zh-CN", "--lang zh-CN check --help", "watch --lang=zh-CN show -h", "check --help --lang zh"],
)
def test_the_language_may_stand_anywhere(words: str) -> None:
    assert called(*words.split(), LANG="C", LC_ALL="").stdout.startswith("用法：sqrtdk ")


@pytest.mark.parametrize("chinese", ["zh-CN", "zh"])
def test_the_language_of_the_program_is_that_of_its_verbs(chinese: str) -> None:
    done = called("--lang", chinese, "params", "gpt2-xl", LANG="C", LC_ALL="")
    assert HAN.search(done.stdout)
    assert not HAN.search(called("--lang", "zh-CN", "params", "gpt2-xl", "--lang", "en").stdout)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("command", REFUSED)
def test_an_error_in_chinese(command: str, tmp_path: Path) -> None:
    done = called(*shlex.split(command), cwd=tmp_path, LC_ALL="zh_CN.UTF-8")
    error, _, hint = done.stderr.partition("\n提示：")
    assert error.startswith("错误：")
    assert HAN.search(error.removeprefix("错误："))
    assert HAN.search(hint)
    assert english(done.stderr) == []


@pytest.mark.parametrize("pattern", _TYPERS_WORDS)
def test_typers_words_in_english_are_those_of_the_catalogue(pattern: str) -> None:
    names_in_it = re.findall(r"\(\?P<(\w+)>", pattern)
    text = str(Message(_TYPERS_WORDS[pattern], **dict.fromkeys(names_in_it, "'--x'")))
    assert re.fullmatch(pattern, text)


def test_an_error_is_english_to_a_program() -> None:
    error = SqrtdkError(Message("errors.files.no_file", model="x"), hint=Message("errors.hint.check_path"))
    assert (str(error), str(error.hint)) == ("there is no file x", "Check the path.")


def test_what_is_told_while_a_verb_runs_is_of_the_catalogue() -> None:
    told = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in TELLS and node.args:
                told.append((path.name, node.lineno, node.args[0]))
    assert len(told) > 20
    assert [(name, line) for name, line, text in told if isinstance(text, ast.Constant | ast.JoinedStr)] == []

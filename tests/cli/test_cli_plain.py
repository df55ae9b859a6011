"""No character of a path, a warning or an error commands the terminal, whatever a model and its files are called."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import threading
import unicodedata
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from sqrtdk import _json
from sqrtdk.cli.errors import PlainMessages
from tests.support.lab_here import LAB
from tests.support.program import Warm, called, terminal

NETS = r"""
import atexit, logging, threading, warnings
import torch
from torch import nn

EVIL = "\x1b[2J\x1b]0;own\x07\x9b31m\u202e"
x = (torch.ones(1, 3, 8),) * 3

class Warns(nn.MultiheadAttention):
    def forward(self, *arguments):
        warnings.warn("a warning" + EVIL)
        logging.getLogger("of" + EVIL).warning("a record %s", EVIL)
        logging.getLogger("transformers.models").error("a record of transformers %s", EVIL)
        thread = threading.Thread(target=self.fails, name="thread" + EVIL)
        thread.start()
        thread.join()
        Dies()
        return super().forward(*arguments)
    def fails(self):
        raise ValueError("in a thread" + EVIL)

class Dies:
    def __del__(self):
        raise ValueError("at its end" + EVIL)

class Raises(nn.MultiheadAttention):
    def forward(self, *arguments):
        raise ValueError("an error" + EVIL)

def warns(): return Warns(8, 2), x
def raises(): return Raises(8, 2), x
def warns_late():
    def stay():
        threading.main_thread().join()  # the main thread waits for this one: the program has ended
        raise ValueError("in a late thread" + EVIL)
    threading.Thread(target=stay).start()
    atexit.register(warnings.warn, "at exit" + EVIL)
    global kept
    kept = Dies()
    return nn.MultiheadAttention(8, 2), x
def factory_raises(): raise ValueError("an error" + EVIL)
def named():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.ModuleDict({"layer" + EVIL: nn.MultiheadAttention(8, 2)})
        def forward(self, *arguments):
            (inner,) = self.inner.values()
            return inner(*arguments)
    Outer.__name__ = "Outer" + EVIL
    return Outer(), x
"""
MODULES = {"nets.py": NETS}
EVIL = "\x1b[2J\x1b]0;own\x07\x9b31m\u202e"
HARMLESS = {"\n", "\r"}


def commands(text: str) -> list[str]:
    return [char for char in text if unicodedata.category(char) in ("Cc", "Cf") and char not in HARMLESS]


CALLS = {
    "a report's path": (["check", "demo", "--seq-len", "8", "--output", f"r{EVIL}"], "JSON report: r\\x1b[2J"),
    "a model's path": (["check", f"./no{EVIL}"], "there is no directory"),
    "a hub id": (["check", f"no{EVIL}"], "is neither a hub id"),
    "a text's path": (["check", "demo", "--text", f"no{EVIL}"], "no\\x1b[2J"),
    "an input's path": (["check", "demo", "--input", f"no{EVIL}.safetensors"], "no\\x1b[2J"),
    "a report's directory": (["check", "demo", "--html", f"no{EVIL}/r"], "no\\x1b[2J"),
    "a device": (["check", "demo", "--device", EVIL], "\\x1b[2J"),
    "a dtype": (["check", "demo", "--dtype", EVIL], "\\x1b[2J"),
    "an option": (["check", f"--no{EVIL}"], "No such option"),
    "a choice": (["check", "--attn", EVIL], "Invalid value"),
    "an argument": (["diff", "demo", "demo", EVIL], "unexpected extra argument"),
    "one of several models": (["check", "--static", "demo", f"no{EVIL}"], "no\\x1b[2J"),
    "a baseline": (["check", "demo", "--baseline", f"no{EVIL}"], "no\\x1b[2J"),
    "an option of a side": (["diff", "demo", "demo", "--a", f"attn={EVIL}"], "attn=\\x1b[2J"),
    "a factory's name": (["check", f"nets:{EVIL}"], "\\x1b[2J"),
    "a module's names": (["check", "nets:named"], "Outer\\x1b[2J"),
    "an error of forward": (["check", "nets:raises"], "an error\\x1b[2J"),
    "an error of the factory": (["check", "nets:factory_raises"], "an error\\x1b[2J"),
    "a traceback": (["check", "nets:raises", "--traceback"], "an error\\x1b[2J"),
    "a path of params": (["params", f"./no{EVIL}"], "no\\x1b[2J"),
    "a report of params": (["params", "--output", f"r{EVIL}"], "r\\x1b[2J"),
    "a claim to show": (["lab", "show", EVIL], "\\x1b[2J"),
    "a claim to run": (["lab", "run", EVIL], "\\x1b[2J"),
    "records": (["lab", "report", EVIL], "\\x1b[2J"),
    "a scale": (["lab", "sweep", "--output", f"o{EVIL}", "--scale", EVIL], "\\x1b[2J"),
    "runs": (["watch", "compare", "nowhere", EVIL], "holds no run"),
    "a verb": ([EVIL], "\\x1b[2J"),
    "an argument of env": (["env", EVIL], "\\x1b[2J"),
}
CALLS = {name: call for name, call in CALLS.items() if LAB or call[0][:1] != ["lab"]}


@pytest.mark.parametrize("name", CALLS)
def test_a_stranger_cannot_command_the_terminal(nets: Path, name: str) -> None:
    arguments, words = CALLS[name]
    done = called(*arguments, cwd=nets)
    assert words in done.stdout + done.stderr
    assert commands(done.stdout + done.stderr) == []


MESSAGES = ("a warning", "a record ", "a record of transformers ", "in a thread", "at its end")


def test_nor_through_pythons_own_messages(sqrtdk: Warm, nets: Path) -> None:
    done = sqrtdk("nets:warns", cwd=nets)
    assert [words for words in MESSAGES if f"{words}\\x1b[2J" not in done.stderr] == []
    assert commands(done.stdout + done.stderr) == []


def test_nor_after_the_report(sqrtdk: Warm, nets: Path) -> None:
    """Threads, exit handlers and objects of the model's outlive `main`."""
    done = sqrtdk("nets:warns_late", cwd=nets, to_the_end=True)
    for words in ("in a late thread", "at exit", "at its end"):
        assert f"{words}\\x1b[2J" in done.stderr
    assert commands(done.stdout + done.stderr) == []


def test_nor_beside_the_spinner(sqrtdk: Warm, nets: Path) -> None:
    """On a terminal all that comes is the spinner's own, and what rich makes of plain text."""
    with terminal() as (name, shown):
        done = sqrtdk("nets:warns", "--output", f"r{EVIL}", cwd=nets, stdout=name, stderr=name, TERM="xterm")
    assert done.returncode == 0
    assert "a warning\\x1b[2J" in shown()
    assert "r\\x1b[2J" in shown()
    for word in ("\x1b[2J", "\x1b]0;", "\x07", "\x9b", "\u202e"):
        assert word not in shown()


def test_a_path_of_any_bytes(tmp_path: Path) -> None:
    """Arguments need not be UTF-8."""
    name = os.fsdecode(b"r\xff\x1b.json")
    done = called("check", "demo", "--seq-len", "8", "--output", name, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "JSON report: r\\udcff\\x1b.json\n" in done.stderr
    assert os.listdir(tmp_path) == [name]
    json.loads((tmp_path / name).read_text())


@pytest.mark.parametrize("columns", ["1", "x", "0", "9" * 5])
def test_any_width(columns: str) -> None:
    done = called("check", "demo", "--seq-len", "8", COLUMNS=columns)
    assert done.returncode == 0, done.stderr
    assert "exact" in done.stdout


def test_pythons_machinery_is_put_back() -> None:
    def machinery() -> list[object]:
        return [warnings.showwarning, threading.excepthook, sys.unraisablehook, logging.StreamHandler.format]

    before = machinery()
    with PlainMessages():
        assert not {*map(id, before)} & {*map(id, machinery())}
    assert machinery() == before


def test_a_log_file_gets_what_is_logged(tmp_path: Path) -> None:
    terminal, file = io.StringIO(), logging.FileHandler(tmp_path / "log")
    for handler in (logging.StreamHandler(terminal), file):
        with PlainMessages():
            handler.emit(logging.LogRecord("name", logging.WARNING, "", 0, "said %s", ("\x1b[2J",), None))
    file.close()
    assert terminal.getvalue() == "said \\x1b[2J\n"
    assert (tmp_path / "log").read_text() == "said \x1b[2J\n"


# ---- JSON: what a model brings may be of any class


class Number(float):
    def __repr__(self) -> str:
        return "\x1b[2J}"

    def __gt__(self, other: object) -> bool:
        raise RuntimeError

    __float__ = __str__ = __lt__ = __repr__  # type: ignore[assignment]


class Count(int):
    def __int__(self) -> int:
        raise RuntimeError

    __repr__ = __str__ = __index__ = __int__  # type: ignore[assignment]


class Text(str):
    def __str__(self) -> str:
        return "another"

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError


class Table(dict[str, object]):
    def items(self) -> object:  # type: ignore[override]
        raise RuntimeError

    __iter__ = keys = values = items  # type: ignore[assignment]


class Sequence(list[object]):
    def __iter__(self) -> Iterator[object]:
        while True:
            yield 1


class Mute:
    def __str__(self) -> str:
        raise RuntimeError


class Liar:
    __class__ = dict  # type: ignore[assignment]

    def __str__(self) -> str:
        return Text("a liar")


VALUES: dict[str, tuple[object, str | None]] = {
    "a number": (Number(0.5), "0.5"),
    "NaN": (Number("nan"), "null"),
    "infinity": (Number("-inf"), '"-Infinity"'),
    "an integer": (Count(7), "7"),
    "a text": (Text("own"), '"own"'),
    "a table": (Table({"a": Number(1.0), Text("b"): Table()}), '{"a": 1.0, "b": {}}'),
    "odd keys": (Table({3: [Count(1)], Mute: 1}), None),
    "a list": (Sequence([1, Number(2.0)]), "[1, 2.0]"),
    "no text": (Mute(), '"<Mute>"'),
    "a false class": (Liar(), '"a liar"'),
    "a key without text": ({Mute(): 1}, '{"<Mute>": 1}'),
    "controls": ("\x7f\x1b\x9b", r'"\u007f\u001b\u009b"'),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_document_is_of_jsons_own_types(name: str) -> None:
    value, text = VALUES[name]
    document = _json.json_document({"value": value, "deeper": [{"value": value}]})
    found = json.loads(document, parse_constant=pytest.fail)
    assert found["value"] == found["deeper"][0]["value"]
    assert document.isascii()
    assert "\x7f" not in document
    if text is not None:
        assert found["value"] == json.loads(text)


def test_a_model_whose_numbers_are_of_its_own_class(tmp_path: Path) -> None:
    (tmp_path / "odd_nets.py").write_text(
        "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n"
        "class Number(float):\n"
        "    def __repr__(self): return '\\x1b[2J}'\n"
        "    __str__ = __repr__\n"
        "    def __format__(self, spec): return '\\x1b[2J}'\n"
        "class Config(dict):\n"
        "    __getattr__ = dict.get\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.qkv, self.scale = nn.Linear(8, 24), Number(0.3)\n"
        "        self.config = Config(model_type='odd', softmax_scale=Number(0.3))\n"
        "    def forward(self, x):\n"
        "        q, k, v = self.qkv(x).unflatten(-1, (3, 1, 8)).permute(2, 0, 3, 1, 4)\n"
        "        return F.scaled_dot_product_attention(q, k, v, scale=self.scale)\n"
        "def make(): return Net(), (torch.randn(1, 4, 8),)\n"
    )
    done = called("check", "odd_nets:make", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (call,) = json.loads(done.stdout, parse_constant=pytest.fail)["calls"]
    assert call["verdict"] == "declared"
    assert call["declared_by"].startswith("config.softmax_scale = 0.3")
    assert commands(done.stdout + done.stderr) == []

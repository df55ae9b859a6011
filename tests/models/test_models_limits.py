"""What a stranger's code may raise, and sizes, seeds, files and options that are refused before they cost anything."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers as hf
from torch import nn

from sqrtdk.errors import InvalidValueError, ModelError, short_text
from sqrtdk.models.demo import load_demo
from sqrtdk.models.inputs import guess_inputs, make_inputs
from sqrtdk.models.limits import MAX_ELEMENTS, check_elements
from sqrtdk.models.load import resolve_model
from sqrtdk.models.options import LoadOptions
from sqrtdk.models.run import call
from sqrtdk.models.tokens import read_text
from tests.hf.families import FAMILIES

LEAVING = """
import sys
from torch import nn

class Own(BaseException):
    pass

class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no text")

def leaves(): sys.exit(0)
def own(): raise Own("stop")
def mute(): raise Mute
def interrupted(): raise KeyboardInterrupt

class Stubborn(nn.Linear):
    def _apply(self, *arguments, **options):
        sys.exit(0)

def stubborn(): return Stubborn(2, 2), ()

class Meta(type):
    def __getattr__(cls, name):
        sys.exit(0)

class Odd(metaclass=Meta):
    pass
"""


class Own(BaseException):
    pass


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Raises(nn.Module):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise self.error


@pytest.fixture
def leaving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leaving_nets.py").write_text(LEAVING)
    (tmp_path / "exits_at_import.py").write_text("import sys\nsys.exit(0)\n")
    (tmp_path / "own_at_import.py").write_text("class Own(BaseException): pass\nraise Own('stop')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "leaving_nets", raising=False)


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Path]:
    """A named pipe that somebody could still write to."""
    path = tmp_path / "pipe.safetensors"
    os.mkfifo(path)
    keep = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    yield path
    os.close(keep)


@pytest.mark.parametrize("error", [SystemExit(0), GeneratorExit(), Own("stop"), Mute(), RuntimeError("no")])
def test_whatever_a_forward_raises_is_an_error_of_the_model(error: BaseException) -> None:
    with pytest.raises(ModelError, match=f"Raises raised {type(error).__name__}: "):
        call(Raises(error), (torch.ones(1),))


def test_an_interrupt_of_the_users_passes() -> None:
    with pytest.raises(KeyboardInterrupt):
        call(Raises(KeyboardInterrupt()), (torch.ones(1),))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("leaving_nets:leaves", "calling .* raised SystemExit: 0"),
        ("leaving_nets:own", "calling .* raised Own: stop"),
        ("leaving_nets:mute", "calling .* raised Mute: "),
        ("leaving_nets:stubborn", "prepared: SystemExit: 0"),
        ("leaving_nets:Odd.make", "raised SystemExit: 0"),
        ("exits_at_import:make", "importing .* raised SystemExit: 0"),
        ("own_at_import:make", "importing .* raised Own: stop"),
    ],
)
def test_whatever_a_factory_raises_is_an_error_of_the_model(leaving: None, model: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        resolve_model(model)


def test_an_interrupted_factory_passes(leaving: None) -> None:
    with pytest.raises(KeyboardInterrupt):
        resolve_model("leaving_nets:interrupted")


def test_an_error_without_a_text_has_a_short_text() -> None:
    assert short_text(Mute()) == "(its text can't be shown: RuntimeError)"


@pytest.mark.parametrize("path", ["/dev/null", ".", "pipe.safetensors"])
def test_a_text_is_a_regular_file(pipe: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.chdir(pipe.parent)
    with pytest.raises(ModelError, match="not a regular file"):
        read_text(path)


def test_a_huge_text_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(2**40)
    with pytest.raises(ModelError, match="at most 16777216 are read"):
        read_text(tmp_path / "huge")


def test_inputs_are_a_regular_file(pipe: Path) -> None:
    folder = pipe.with_name("folder.safetensors")
    folder.mkdir()
    for path in (pipe, folder):
        with pytest.raises(ModelError, match="not a regular file"):
            resolve_model("demo", LoadOptions(input_file=path))


def test_huge_inputs_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.safetensors"
    with open(path, "wb") as file:
        file.truncate(2**40)
    with pytest.raises(ModelError, match=f"at most {2**31} are read"):
        resolve_model("demo", LoadOptions(input_file=path))


def test_a_config_is_a_regular_file(pipe: Path) -> None:
    pipe.rename(pipe.with_name("config.json"))
    with pytest.raises(ModelError, match=r"config\.json' is not a regular file"):
        resolve_model(str(pipe.parent))


def test_a_text_that_tells_no_size_is_cut_at_the_limit() -> None:
    """Files of /proc say that they have 0 bytes."""
    assert "Name" in read_text("/proc/self/status")


@pytest.mark.parametrize("model", ["demo", "llama", "vit"])
def test_sizes_that_fit_nowhere_are_refused(tmp_path: Path, model: str) -> None:
    if model != "demo":
        config = FAMILIES["llama"]() if model == "llama" else hf.ViTConfig(num_hidden_layers=1)
        config.save_pretrained(tmp_path)
        model = str(tmp_path)
    with pytest.raises(InvalidValueError, match=f"elements; at most {MAX_ELEMENTS}") as caught:
        resolve_model(model, LoadOptions(batch=100_000_000_000, seq_len=100, static=True))
    assert "--batch" in caught.value.hint


def test_pixels_of_a_config_are_limited() -> None:
    with torch.device("meta"):
        module = hf.ViTModel(hf.ViTConfig(num_hidden_layers=1))
    config = hf.ViTConfig(num_hidden_layers=1, image_size=10_000_000)
    with pytest.raises(InvalidValueError, match="pixel_values"):
        make_inputs(module, config)


def test_the_limit_itself_is_allowed() -> None:
    check_elements("input_ids", (MAX_ELEMENTS // 1024, 1024))
    with pytest.raises(InvalidValueError):
        guess_inputs(load_demo(), batch=MAX_ELEMENTS // 1024 + 1, seq_len=1024)


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 10**30])
@pytest.mark.parametrize("model", ["demo", "leaving_nets:leaves"])
def test_a_seed_that_torch_does_not_take_is_refused(leaving: None, seed: int, model: str) -> None:
    with pytest.raises(InvalidValueError, match=f"seed {seed}"):
        resolve_model(model, LoadOptions(seed=seed))


@pytest.mark.parametrize("seed", [2**64 - 1, -(2**63)])
def test_the_outermost_seeds_serve_a_decoder_too(tmp_path: Path, seed: int) -> None:
    FAMILIES["t5"]().save_pretrained(tmp_path)
    ids = resolve_model(str(tmp_path), LoadOptions(seed=seed, seq_len=64, static=True)).inputs
    assert set(ids) >= {"input_ids", "decoder_input_ids"}


@pytest.mark.parametrize("text", [False, True])
def test_the_demo_has_positions_too(tmp_path: Path, text: bool) -> None:
    (tmp_path / "t.txt").write_text("abc")
    loaded = resolve_model("demo", LoadOptions(seq_len=100_000, text=tmp_path / "t.txt" if text else None))
    assert loaded.inputs["input_ids"].shape == (1, 1024)
    (note,) = loaded.notes
    assert "100000 was cut to 1024" in note
    assert resolve_model("demo", LoadOptions(seq_len=1024)).notes == ()


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"seq_len": 0}, {"seq_len": -3}])
def test_the_demo_wants_sizes_above_zero(sizes: dict[str, int]) -> None:
    with pytest.raises(InvalidValueError, match="at least 1"):
        resolve_model("demo", LoadOptions(**sizes))


@pytest.mark.parametrize("options", [{"device_map": "auto"}, {"offload_folder": "x"}])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("model", ["demo", "leaving_nets:leaves"])
def test_what_is_not_a_checkpoint_is_not_spread(
    leaving: None, model: str, static: bool, options: dict[str, str]
) -> None:
    with pytest.raises(InvalidValueError, match=next(iter(options))):
        resolve_model(model, LoadOptions(static=static, **options))


def test_options_without_effect_are_noted() -> None:
    notes = resolve_model("demo", LoadOptions(revision="main", attn="eager")).notes
    assert any("--revision main was ignored" in note for note in notes)
    assert any("--attn eager was ignored" in note for note in notes)

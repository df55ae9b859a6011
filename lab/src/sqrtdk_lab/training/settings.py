"""Everything that decides the outcome of a training run: its settings, with defaults filled in, and its task.

The models learn to continue text, or a string task that only cross attention can solve. The text is the source of
Python's standard library, real text that is on every machine. The string task is to reproduce the letters of a source
in reverse, without the noise. The source mixes letters with noise symbols at random places, so that a letter's place in
the target says little about its place in the source: the decoder has to search for it. Every letter is drawn
independently, so a model that ignores the source loses log 16 nats per letter.
"""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sqrtdk.errors import InvalidValueError, LabError

SETTING_CHOICES: dict[str, tuple[str, ...]] = {
    "model": ("decoder", "encoder_decoder"),
    "score": ("dot", "additive", "cosine"),
    "scale": ("none", "sqrt_dk", "dk", "power", "learned"),
    "init": ("unit", "folded", "0.02"),
    "precision": ("float32", "bfloat16"),
    "logits": ("kernel", "stored"),
}


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """One training run.

    Attributes:
        model: "decoder", on text, or "encoder_decoder", on strings.
        head_dim: d_k; the width of the values and all other sizes are independent of it.
        rate: largest learning rate.
        seed: of the weights and of the order of the data.
        heads: of each attention.
        score: "dot", "additive" (v . tanh(q + k)) or "cosine" (with a learned gain per head, initially 10).
        scale: "none" (1), "sqrt_dk", "dk", "power" (factor * d_k^-exponent), or "learned": a learned factor per head on
            1/sqrt(d_k).
        factor: of "power".
        exponent: of "power".
        init: "unit": standard deviation fan_in^-1/2, so that entries of q and k have variance 1; "folded": q's weights
            times d_k^-1/2, so that the product has variance 1; "0.02": this standard deviation for q's and k's weights.
        precision: "float32", or "bfloat16" by autocast.
        logits: "kernel": as the library computes them; "stored": the dot product rounded to autocast's type before the
            scale, as in attention written as two matrix products.
        tied: whether all heads of an attention share their weights of q and k.
        steps: of the optimiser.
        rows: windows or strings in a batch.
        length: bytes of a window, or symbols of a source.
        width: d_model.
        layers: of the decoder, and of the encoder.
        text_bytes: of the text to train on, from its start; 0: all of it.
        points: number of observations of the run; 0: none.
    """

    model: str
    head_dim: int
    rate: float
    seed: int
    heads: int = 1
    score: str = "dot"
    scale: str = "sqrt_dk"
    factor: float = 1.0
    exponent: float = 0.5
    init: str = "unit"
    precision: str = "float32"
    logits: str = "kernel"
    tied: bool = False
    steps: int = 300
    rows: int = 32
    length: int = 12
    width: int = 64
    layers: int = 1
    text_bytes: int = 0
    points: int = 24

    def __post_init__(self) -> None:
        for name, allowed in SETTING_CHOICES.items():
            if getattr(self, name) not in allowed:
                raise InvalidValueError(f"{name} is {getattr(self, name)!r}", hint=f"Use one of: {', '.join(allowed)}.")
        least = {"head_dim": 2, "heads": 1, "steps": 2, "rows": 1, "length": 4, "width": 2, "layers": 1, "points": 0}
        for name, low in {**least, "seed": 0, "text_bytes": 0}.items():
            if getattr(self, name) < low:
                raise InvalidValueError(f"{name} is at least {low}; got {getattr(self, name)}", hint="Raise it.")
        if not 0.0 < self.rate < math.inf:
            raise InvalidValueError(f"rate is a finite number above 0; got {self.rate}", hint="1e-3, for one.")
        if self.width % self.heads:
            raise InvalidValueError(
                f"heads divides width; got {self.heads} heads and width {self.width}", hint="Values share the width."
            )
        if self.logits == "stored" and (self.score != "dot" or self.precision == "float32"):
            raise InvalidValueError(
                f"stored logits are those of a dot product in autocast; got {self.score} in {self.precision}",
                hint="Use logits='kernel'.",
            )

    @classmethod
    def of(cls, cell: Mapping[str, Any]) -> TrainingSettings:
        """Return the settings of a cell; see `cell`.

        Raises:
            InvalidValueError: A name is unknown, or a value out of range.
        """
        unknown = set(cell) - set(cls.__dataclass_fields__)
        if unknown:
            raise InvalidValueError(f"a training run has no {', '.join(sorted(unknown))}", hint="See TrainingSettings.")
        return cls(**cell)

    def cell(self) -> dict[str, Any]:
        """Return all settings as JSON data: equal runs are equal cells.

        Example:
            >>> one = TrainingSettings("encoder_decoder", head_dim=16, rate=1e-3, seed=0)
            >>> TrainingSettings.of(one.cell()) == one
            True
        """
        return asdict(self)


SKIP = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__", "encodings"}
BYTES = 256


def stdlib_text() -> tuple[Tensor, Tensor]:
    """Return bytes for training and, from every 20th file, for the held-out loss; files in the order of their names.

    Raises:
        LabError: This Python has no source files.
    """
    root = Path(sysconfig.get_path("stdlib"))
    names = [path.relative_to(root) for path in root.rglob("*.py")]
    names = sorted((name for name in names if not SKIP & set(name.parts)), key=Path.as_posix)
    if len(names) < 20:
        raise LabError(
            f"the text to train on is Python's standard library; {root} holds {len(names)} source files",
            hint="Use a Python that has its library as .py files.",
        )
    train, held_out = bytearray(), bytearray()
    for index, name in enumerate(names):
        (held_out if index % 20 == 10 else train).extend((root / name).read_bytes())
    return torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8)


def batch(text: Tensor, rows: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return random windows and the same windows one byte later, both (rows, length)."""
    start = torch.randint(len(text) - length, (rows,), generator=generator)
    window = text[start[:, None] + torch.arange(length + 1)].long()
    return window[:, :-1], window[:, 1:]


def learning_rate(step: int, steps: int, peak: float, warm_up: int) -> float:
    """Return the rate of a step: linear warm-up, then a cosine down to a tenth of the peak."""
    if step < warm_up:
        return peak * (step + 1) / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return peak * (0.55 + 0.45 * math.cos(math.pi * done))


LETTERS, NOISE = 16, 10
START = LETTERS + NOISE  # first symbol that the decoder reads
SYMBOLS = START + 1


def letters_in(length: int) -> int:
    """Return the number of letters among the symbols of a source: three of four."""
    return length * 3 // 4


def strings(rows: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return sources and their targets.

    Args:
        rows: number of strings.
        length: symbols of a source, 4 or more.
        generator: of the strings.

    Returns:
        Sources (rows, length), integers below `START`; targets (rows, letters_in(length)), integers below `LETTERS`.

    Example:
        >>> source, target = strings(1, 8, torch.Generator().manual_seed(0))
        >>> source[source < LETTERS].flip(0).equal(target[0])
        True
    """
    count = letters_in(length)
    letters = torch.randint(LETTERS, (rows, count), generator=generator)
    source = torch.randint(LETTERS, START, (rows, length), generator=generator)
    places = torch.rand(rows, length, generator=generator).argsort(1)[:, :count].sort(1).values
    return source.scatter(1, places, letters), letters.flip(1)

"""What decides the outcome of a training run: a cell, checked and with its defaults filled in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sqrtdk.errors import InvalidValueError

CHOICES: dict[str, tuple[str, ...]] = {
    "model": ("decoder", "encoder_decoder"),
    "score": ("dot", "additive", "cosine"),
    "scale": ("none", "sqrt_dk", "dk", "learned"),
    "init": ("unit", "folded", "0.02"),
    "precision": ("float32", "bfloat16"),
    "logits": ("kernel", "stored"),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """One training run.

    Attributes:
        model: "decoder", on text, or "encoder_decoder", on strings.
        head_dim: d_k; the width of the values and all other sizes do not change with it.
        rate: largest learning rate.
        seed: of the weights and of the order of the data.
        heads: of each attention.
        score: "dot", "additive" (v . tanh(q + k)) or "cosine" (with a learned gain a head, 10 at the start).
        scale: "none" (1), "sqrt_dk", "dk", or "learned": a factor a head on 1/sqrt(d_k).
        init: "unit": standard deviation fan_in^-1/2, entries of q and k have variance 1; "folded": q's weights times
            d_k^-1/2, so that the product has variance 1; "0.02": that standard deviation for q's and k's weights.
        precision: "float32", or "bfloat16" by autocast.
        logits: "kernel": as the library computes them; "stored": the dot product rounded to autocast's type before
            the scale, as in attention written out as two matrix products.
        tied: all heads of an attention share their weights of q and k.
        steps: of the optimiser.
        rows: windows or strings in a batch.
        length: bytes of a window, or symbols of a source.
        width: d_model.
        layers: of the decoder, and of the encoder.
        points: how often the run is observed; 0: never.
    """

    model: str
    head_dim: int
    rate: float
    seed: int
    heads: int = 1
    score: str = "dot"
    scale: str = "sqrt_dk"
    init: str = "unit"
    precision: str = "float32"
    logits: str = "kernel"
    tied: bool = False
    steps: int = 300
    rows: int = 32
    length: int = 12
    width: int = 64
    layers: int = 1
    points: int = 24

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise InvalidValueError(f"{name} is {getattr(self, name)!r}", hint=f"Use one of: {', '.join(allowed)}.")
        least = {"head_dim": 2, "heads": 1, "steps": 2, "rows": 1, "length": 4, "width": 2, "layers": 1, "points": 0}
        for name, low in {**least, "seed": 0}.items():
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
    def of(cls, cell: Mapping[str, Any]) -> Settings:
        """The settings of a cell; see `cell`.

        Raises:
            InvalidValueError: an unknown name, or a value out of range.
        """
        unknown = set(cell) - set(cls.__dataclass_fields__)
        if unknown:
            raise InvalidValueError(f"a training run has no {', '.join(sorted(unknown))}", hint="See Settings.")
        return cls(**cell)

    def cell(self) -> dict[str, Any]:
        """All settings as JSON data: equal runs are equal cells.

        Example:
            >>> one = Settings("encoder_decoder", head_dim=16, rate=1e-3, seed=0)
            >>> Settings.of(one.cell()) == one
            True
        """
        return asdict(self)

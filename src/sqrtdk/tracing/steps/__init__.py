"""What can happen to the logits between the product of q and k and the softmax: one frozen class for each kind of step.

A step is written into the formula (`write`, into an `Expression`), listed as a stage of the record (`stage`), and taken
off the logits before the scale is read from them (`undo`, from a `Sample`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sqrtdk.tracing.records import BLOCKS, DATA, ROWS, Factor, Stage
from sqrtdk.tracing.steps.placed import Placed, Sample
from sqrtdk.tracing.tape.node import Node

ZERO_ONE = "zero-one mask"  # a bias of 0 and 1 where a mask has them: one that was meant to be bool
ZERO_ONE_FACTOR = "mul by a 0/1 mask"  # an unknown step
OWN = "a sum with a function of the logits"  # another one
_ROUNDING = 0.05  # relative error of the unmixed logits at which their slope still stands, as it averages over hundreds


def number(value: float) -> str:
    """Four significant digits, no trailing zeros: 0.125, 0.08839, 1."""
    return f"{value:.4g}"


class Expression:
    """What the steps have written so far.

    Masks are named last, as a reader expects them, unless a later step multiplies or caps them.

    Example:
        >>> expression = Expression("q.k")
        >>> expression.scale(Factor(0.125, "logits", "number"))
        >>> expression.hide("causal")
        >>> expression.text()
        '0.125 * q.k + causal'
    """

    def __init__(self, product: str) -> None:
        self._inner = product
        self._coefficient = 1.0
        self._symbols: list[str] = []
        self._terms = 1
        self._masks: list[str] = []
        self._unknown: list[str] = []

    def scale(self, factor: Factor) -> None:
        """Multiply all that is written, the masks too."""
        self.settle(masks=True)
        if factor.source in (DATA, ROWS):
            self._symbols.append(factor.source)
        elif factor.source == BLOCKS:
            self._symbols.append("scale[block]")
        elif factor.per_head is not None or factor.learned:
            name = factor.source.split(".")[-1].removeprefix("parameter ")
            name = name if factor.source.startswith("parameter") else "scale"
            self._symbols.append(f"{name}[h]" if factor.per_head is not None else name)
        elif factor.value is None:
            self._symbols.append("?")
        else:
            self._coefficient *= factor.value

    def add(self, term: str) -> None:
        """Add a term."""
        self.settle()
        self._inner = f"{self._written()} + {term}"
        self._coefficient, self._symbols, self._terms = 1.0, [], self._terms + 1

    def hide(self, mask: str) -> None:
        """Add a mask."""
        self.settle()
        self._masks.append(mask)

    def wrap(self, function: str, *arguments: str) -> None:
        """Put what is written into a function, as its first argument."""
        self.settle()
        self._become(f"{function}({', '.join([self._written(), *arguments])})")

    def power(self, exponent: float) -> None:
        """Raise what is written to a power."""
        self.settle(masks=True)
        written = self._written()
        alone = written == self._inner and self._terms == 1 and not written.endswith("^2")
        self._become(f"{written}^{exponent:g}" if alone else f"({written})^{exponent:g}")

    def cap(self, cap: float | None, *, by_logits: bool = False) -> None:
        """Put what is written, the masks too, through cap * tanh(. / cap), or through . * tanh(. / cap)."""
        self.settle(masks=True)
        inner = self._written() if self._terms == 1 else f"({self._written()})"
        self._become(f"tanh({inner} / {number(cap)})" if cap not in (None, 1.0) else f"tanh({self._written()})")
        if by_logits:
            self._symbols = [inner]
        elif cap is None:
            self._symbols = ["?"]
        else:
            self._coefficient = cap

    def lose(self, operation: str) -> None:
        """Note an operation that could not be followed; several in a row are written as one."""
        self._unknown.append(operation)

    def text(self, last: Iterable[str] = ()) -> str:
        """The whole, with the masks and then `last` added, each once."""
        self.settle()
        return " + ".join([self._written(), *dict.fromkeys([*self._masks, *last])])

    def settle(self, *, masks: bool = False) -> None:
        """End a run of operations that could not be followed; with `masks`, write the masks so far."""
        if self._unknown:
            self._become(f"unknown({', '.join(dict.fromkeys(self._unknown))})({self._written()})")
            self._unknown = []
        if masks:
            hidden, self._masks = self._masks, []
            for mask in hidden:
                self.add(mask)

    def _become(self, inner: str) -> None:
        self._inner, self._coefficient, self._symbols, self._terms = inner, 1.0, [], 1

    def _written(self) -> str:
        factors = [*([number(self._coefficient)] if self._coefficient != 1.0 else []), *self._symbols]
        inner = f"({self._inner})" if factors and self._terms > 1 else self._inner
        return " * ".join([*factors, inner])


@dataclass(frozen=True, slots=True)
class Step:
    """One step; a new kind overrides what it does."""

    at: str | None = field(default=None, kw_only=True)  # file and line, where not those of the softmax or kernel

    def write(self, expression: Expression) -> None:
        """Add the step to the formula, inside out; most that leave the softmax as it is are not written."""

    def stage(self) -> Stage | None:
        """The stage of the record, None where there is none."""
        return None

    def undo(self, sample: Sample) -> Sample:
        """The sampled logits without the step, as far as it is no factor; called from the softmax inwards."""
        return sample


@dataclass(frozen=True, slots=True)
class Scale(Step):
    """The logits times a factor."""

    factor: Factor  # as the record tells it
    by: Placed | None = None  # its values, where they are no single number, and are known and needed: one a row, say

    def write(self, expression: Expression) -> None:
        expression.scale(self.factor)

    def stage(self) -> Stage:
        return Stage("logits", "scale", self.factor.text())

    def undo(self, sample: Sample) -> Sample:
        return sample.under(self.factor.value)


@dataclass(frozen=True, slots=True)
class Bias(Step):
    """A tensor added to the logits: a position bias, or a further term of the score.

    Entries that hide their key as well, a mask in the same tensor, are a `Hide` besides.
    """

    name: str  # "alibi", "relative", "disentangled", `ZERO_ONE` or "bias"
    addend: Placed | None  # None where the values are not known
    content: int = 0  # how many products with the content of q or k it sums; it belongs to the score then

    def write(self, expression: Expression) -> None:
        expression.add(self.name)

    def stage(self) -> Stage:
        return Stage("logits", "bias", self.name)

    def undo(self, sample: Sample) -> Sample:
        return sample if self.addend is None else sample.without(self.addend)


@dataclass(frozen=True, slots=True)
class Squares(Bias):
    """|q|^2, |k|^2 or both, times `sign`: with -2 q.k they are the squared distance of q and k."""

    sign: float = 1.0


@dataclass(frozen=True, slots=True)
class Hide(Step):
    """A mask: keys hidden from rows by a number that was added, or written over their logits."""

    form: str  # "bool", "float", or "implicit" (a causal flag or a window that the operation was given)
    fill: float | None  # the number that marks a hidden key; None where it is not known
    visible: Placed | None = None  # True where the row sees the key; None where it is not known
    name: str | None = None  # of its pattern ("causal", "padding", ...); None while unread, and if it hides nothing
    beside_bias: bool = False  # the tensor that hides is a bias as well, a step of its own
    causal: bool = False  # it is the causal flag, upper-left
    source: Node | None = None  # the tensor that was added, where it is known to hide

    def write(self, expression: Expression) -> None:
        if self.name is not None:
            expression.hide(self.name)

    def stage(self) -> Stage:
        detail = "causal" if self.causal else "in the same tensor" if self.beside_bias else "mask"
        return Stage("logits", "mask", detail)


@dataclass(frozen=True, slots=True)
class Sink(Step):
    """Learned sinks, one more term in the softmax's denominator (gpt-oss, arXiv:2508.10925, section 2.2).

    The sinks of Xiao et al. 2023 (arXiv:2309.17453) are tokens. The formula names them last, after the masks.
    """

    column: bool = True  # they stand beside the logits, as a key would

    def stage(self) -> Stage | None:
        return Stage("logits", "sinks", "sinks") if self.column else None


@dataclass(frozen=True, slots=True)
class Softcap(Step):
    """cap * tanh(logits / cap) (Gemma 2, arXiv:2408.00118); `cap` is None where the number could not be read.

    With `by_logits` it is logits * tanh(logits / cap), which caps nothing: a mistake.
    """

    cap: float | None = None
    by_logits: bool = False

    @property
    def detail(self) -> str:
        """What it is in place of a softcap: "z * tanh(z / 3)"; empty of one."""
        return f"z * tanh(z / {self.cap or 1:.4g})" if self.by_logits else ""

    def write(self, expression: Expression) -> None:
        expression.cap(self.cap, by_logits=self.by_logits)

    def stage(self) -> Stage:
        return Stage("logits", "softcap", self.detail or ("" if self.cap is None else f"{self.cap:.4g}"))

    def undo(self, sample: Sample) -> Sample:
        if not self.cap or self.by_logits:
            return sample
        return replace(sample, logits=self.cap * (sample.logits / self.cap).clamp(-1 + 1e-12, 1 - 1e-12).atanh())


@dataclass(frozen=True, slots=True)
class Clamp(Step):
    """A clamp that can bite; `bounds` are lowest and largest, as text, and an empty one is none."""

    bounds: str

    def write(self, expression: Expression) -> None:
        expression.wrap("clamp", self.bounds)

    def stage(self) -> Stage:
        return Stage("logits", "clamp", self.bounds)


@dataclass(frozen=True, slots=True)
class Offset(Step):
    """A row's maximum, taken off before the softmax, which does not see it; None where the values are not known."""

    addend: Placed | None

    def undo(self, sample: Sample) -> Sample:
        return sample if self.addend is None else sample.without(self.addend)

    def varies(self, keys: int) -> bool:
        """Whether it differs along the axis of the keys, as a maximum over the heads does: the softmax sees that."""
        if self.addend is None:
            return False
        line = self.addend.at_softmax().movedim(keys, -1)
        return line.stride(-1) != 0 and bool((line != line[..., :1]).any())


@dataclass(frozen=True, slots=True)
class Power(Step):
    """A power of a distance: |q - k| squared, or the root of |q - k|^2."""

    exponent: float

    def write(self, expression: Expression) -> None:
        expression.power(self.exponent)

    def stage(self) -> Stage:
        return Stage("logits", "power", f"{self.exponent:g}")


@dataclass(frozen=True, slots=True)
class Beside(Step):
    """Logits of several products of the same scale, side by side before one softmax."""

    products: int

    @property
    def text(self) -> str:
        """What a reader is told."""
        return f"logits of {self.products} products side by side"

    def stage(self) -> Stage:
        return Stage("logits", "joined", self.text)


@dataclass(frozen=True, slots=True)
class Blocks(Step):
    """Blocks of keys, each with a product of its own, under one softmax."""

    count: int

    def stage(self) -> Stage:
        return Stage("logits", "joined", f"logits of {self.count} blocks of keys")


@dataclass(frozen=True, slots=True, eq=False)
class Mix(Step):
    """Logits mixed over the heads (talking heads, Shazeer et al. 2020, arXiv:2003.02436).

    Head g of the mixed logits is the sum over h of matrix[g, h] times head h.
    """

    matrix: Tensor | None = None  # (H mixed, H), float64; None where its values are not known

    def write(self, expression: Expression) -> None:
        expression.settle(masks=True)  # what was hidden before is mixed as well
        expression.wrap("mix")

    def stage(self) -> Stage:
        return Stage("logits", "mix", "over the heads")

    def undo(self, sample: Sample) -> Sample:
        """Heads are the second axis of the sample; a number that was added to a whole head stays one."""
        if self.matrix is None:
            return sample
        return replace(sample, logits=torch.einsum("hg,bgm->bhm", torch.linalg.inv(self.matrix), sample.logits))

    def fixed(self, heads: int, eps: float) -> str | None:
        """Why it can't be undone in logits of `heads` heads that were rounded to `eps`; None where it can."""
        if self.matrix is None:
            return "the matrix that mixes the heads is not known"
        if self.matrix.shape != (heads, heads):
            return "the heads are not as many as the matrix mixes"
        if not bool(torch.linalg.cond(self.matrix) * eps < _ROUNDING):
            return "the mixing of the heads can't be undone"
        return None


@dataclass(frozen=True, slots=True)
class Unknown(Step):
    """An operation that could not be followed, by its name."""

    name: str

    def write(self, expression: Expression) -> None:
        expression.lose(self.name)

    def stage(self) -> Stage:
        return Stage("logits", "unknown", self.name)


def scaled_by(steps: Sequence[Step], position: int) -> float | None:
    """Product of the later factors, which multiply what the step at `position` added; None where it is 1."""
    factors = (step.factor.value for step in steps[position + 1 :] if isinstance(step, Scale))
    product = math.prod(value for value in factors if value is not None)
    return None if product == 1 else float(product)

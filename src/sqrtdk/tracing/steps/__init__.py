"""The steps between the product of q and k and the softmax: one frozen class for each kind.

A step writes itself into the formula (`write`, into an `Expression`), describes itself as a stage of the record
(`stage`), and is removed from the logits before the scale is read from them (`undo`, from a `Sample`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from sqrtdk.messages import Message
from sqrtdk.tracing.records import BY_BLOCK, BY_ROW, FROM_DATA, CallFault, Factor, Stage
from sqrtdk.tracing.steps.placed import Sample, StepTensor
from sqrtdk.tracing.tape.node import Node

ZERO_ONE = "zero-one mask"  # a bias of zeros and ones: `logits + mask` with a mask that was meant to be bool
OF_LOGITS = "trace.step.sum_of_logits"  # an unknown step: `logits + logits.tanh()`
_PATH = re.compile(r"(?:\w+\.)+(?=[A-Za-z_])")  # of a parameter, before its own name; 0.5 is not a path
_ROUNDING = 0.05  # largest relative error of unmixed logits: the slope stands, as it averages over hundreds of them


def short_number(value: float) -> str:
    """Return a number with four significant digits and no trailing zeros: 0.125, 0.08839, 1."""
    return f"{value:.4g}"


class Expression:
    """A formula under construction.

    Masks are named last, as a reader expects, unless a later step multiplies or caps them.

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
        """Multiply the whole expression, masks included, by a factor: its number, or else a symbol for it."""
        self.settle(masks=True)
        if factor.source in (FROM_DATA, BY_ROW):
            self._symbols.append(factor.source)
        elif factor.source == BY_BLOCK:
            self._symbols.append("scale[block]")
        elif factor.per_head is not None or factor.learned:
            # without the path: exp(-h.0.attn.log_t) is written exp(-log_t)
            name = _PATH.sub("", factor.source.removeprefix("parameter "))
            name = name if factor.source.startswith("parameter") else "scale"
            self._symbols.append(f"{name}[h]" if factor.per_head is not None else name)
        elif factor.value is None:
            self._symbols.append("?")
        else:
            self._coefficient *= factor.value

    def add(self, term: str) -> None:
        """Add a term, `expression + term`."""
        self.settle()
        self._inner = f"{self._written()} + {term}"
        self._coefficient, self._symbols, self._terms = 1.0, [], self._terms + 1

    def hide(self, mask: str) -> None:
        """Add the name of a mask, which is written after all terms."""
        self.settle()
        self._masks.append(mask)

    def wrap(self, function: str, *arguments: str) -> None:
        """Make the expression the first argument of a function: `function(expression, *arguments)`."""
        self.settle()
        self._become(f"{function}({', '.join([self._written(), *arguments])})")

    def power(self, exponent: float) -> None:
        """Raise the expression, masks included, to a power."""
        self.settle(masks=True)
        written = self._written()
        alone = written == self._inner and self._terms == 1 and not written.endswith("^2")
        self._become(f"{written}^{exponent:g}" if alone else f"({written})^{exponent:g}")

    def cap(self, cap: float | None, *, by_logits: bool = False) -> None:
        """Wrap the expression z, masks included, in cap * tanh(z / cap), or in z * tanh(z / cap) if `by_logits`."""
        self.settle(masks=True)
        inner = self._written() if self._terms == 1 else f"({self._written()})"
        self._become(f"tanh({inner} / {short_number(cap)})" if cap not in (None, 1.0) else f"tanh({self._written()})")
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
        """Return the formula, with the masks and then `last` added, each once."""
        self.settle()
        return " + ".join([self._written(), *dict.fromkeys([*self._masks, *last])])

    def settle(self, *, masks: bool = False) -> None:
        """Writes pending operations that could not be followed and, with `masks`, the masks so far."""
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
        factors = [*([short_number(self._coefficient)] if self._coefficient != 1.0 else []), *self._symbols]
        inner = f"({self._inner})" if factors and self._terms > 1 else self._inner
        return " * ".join([*factors, inner])


@dataclass(frozen=True, slots=True)
class Step:
    """One step. Each kind overrides the methods that apply to it."""

    at: str | None = field(default=None, kw_only=True)  # file and line, if not those of the softmax or kernel

    def write(self, expression: Expression) -> None:
        """Add the step to the formula. Steps are written in order from the product to the softmax."""

    def stage(self) -> Stage | None:
        """Return the stage that describes the step in the record, or None if it is not listed."""
        return None

    def undo(self, sample: Sample) -> Sample:
        """Return the sampled logits before the step.

        It is called in order from the softmax back to the product. A factor is not divided out, only remembered.
        """
        return sample


@dataclass(frozen=True, slots=True)
class Scale(Step):
    """The logits times a factor."""

    factor: Factor  # the factor as recorded
    by: StepTensor | None = (
        None  # values of a factor that is not a single number, such as one per row, if known and needed
    )

    def write(self, expression: Expression) -> None:
        expression.scale(self.factor)

    def stage(self) -> Stage:
        return Stage("logits", "scale", self.factor.text())

    def undo(self, sample: Sample) -> Sample:
        return sample.under(self.factor.value)


@dataclass(frozen=True, slots=True)
class Bias(Step):
    """A tensor added to the logits: a position bias, or a further term of the score.

    A tensor that is bias and mask at once is this step followed by a `Hide`.
    """

    name: str  # "alibi", "relative", "disentangled", `ZERO_ONE` or "bias"
    addend: StepTensor | None  # None if the values are unknown
    content: int = 0  # number of products with q or k that it sums; if not 0, it belongs to the score

    def write(self, expression: Expression) -> None:
        expression.add(self.name)

    def stage(self) -> Stage:
        return Stage("logits", "bias", self.name)

    def undo(self, sample: Sample) -> Sample:
        return sample if self.addend is None else sample.without(self.addend)


@dataclass(frozen=True, slots=True)
class Squares(Bias):
    """|q|^2, |k|^2 or both, times `sign`. With -2 q.k they make the squared distance |q - k|^2."""

    sign: float = 1.0


@dataclass(frozen=True, slots=True)
class Hide(Step):
    """A mask: keys hidden from rows by adding a number to their logits, or by overwriting them."""

    form: str  # "bool", "float", or "implicit" (a causal flag or a window argument of the operation)
    fill: float | None  # number that marks a hidden key; None if unknown
    visible: StepTensor | None = None  # True where the row sees the key; None if unknown
    name: str | None = None  # pattern ("causal", "padding", ...); None while unread, and if it hides nothing
    beside_bias: bool = False  # the same tensor is also a bias, which is a separate step
    causal: bool = False  # the causal flag of a fused call, upper-left
    source: Node | None = None  # the added tensor, if it is known to hide keys

    def write(self, expression: Expression) -> None:
        if self.name is not None:
            expression.hide(self.name)

    def stage(self) -> Stage:
        detail = "causal" if self.causal else "in the same tensor" if self.beside_bias else "mask"
        return Stage("logits", "mask", detail)


@dataclass(frozen=True, slots=True)
class LearnedSinks(Step):
    """Learned sinks, one more term in the softmax's denominator (gpt-oss, arXiv:2508.10925, section 2.2).

    The sinks of Xiao et al. 2023 (arXiv:2309.17453) are tokens instead. The formula names sinks last, after the masks.
    """

    column: bool = True  # `cat([logits, sinks], -1)`: they have a column of their own, like a key

    def stage(self) -> Stage | None:
        return Stage("logits", "sinks", "sinks") if self.column else None


@dataclass(frozen=True, slots=True)
class Softcap(Step):
    """cap * tanh(logits / cap) (Gemma 2, arXiv:2408.00118). `cap` is None if the number could not be read.

    With `by_logits` it is logits * tanh(logits / cap), a mistake that caps nothing.
    """

    cap: float | None = None
    by_logits: bool = False

    @property
    def detail(self) -> str:
        """The formula used in place of a softcap, such as "z * tanh(z / 3)"; "" for a proper softcap."""
        return f"z * tanh(z / {self.cap or 1:.4g})" if self.by_logits else ""

    def write(self, expression: Expression) -> None:
        expression.cap(self.cap, by_logits=self.by_logits)

    def stage(self) -> Stage:
        return Stage("logits", "softcap", self.detail or ("" if self.cap is None else f"{self.cap:.4g}"))

    def undo(self, sample: Sample) -> Sample:
        if not self.cap or self.by_logits:
            return sample
        # The clamp keeps atanh finite for logits that were rounded to the cap.
        return replace(sample, logits=self.cap * (sample.logits / self.cap).clamp(-1 + 1e-12, 1 - 1e-12).atanh())


@dataclass(frozen=True, slots=True)
class Clamp(Step):
    """A clamp that can change logits. `bounds` is the text of its lower and upper bound; an empty one is missing."""

    bounds: str

    def write(self, expression: Expression) -> None:
        expression.wrap("clamp", self.bounds)

    def stage(self) -> Stage:
        return Stage("logits", "clamp", self.bounds)


@dataclass(frozen=True, slots=True)
class Offset(Step):
    """A row's maximum subtracted before the softmax, `logits - logits.amax(-1, keepdim=True)`, which cancels.

    `addend` is None if the values are unknown.
    """

    addend: StepTensor | None

    def undo(self, sample: Sample) -> Sample:
        return sample if self.addend is None else sample.without(self.addend)

    def varies(self, keys: int) -> bool:
        """Return whether it differs between keys and so changes the softmax, as a maximum over the heads does."""
        if self.addend is None:
            return False
        line = self.addend.at_softmax().movedim(keys, -1)
        return line.stride(-1) != 0 and bool((line != line[..., :1]).any())


@dataclass(frozen=True, slots=True)
class Power(Step):
    """A power of a distance: |q - k| squared, or |q - k|^2 under a square root."""

    exponent: float

    def write(self, expression: Expression) -> None:
        expression.power(self.exponent)

    def stage(self) -> Stage:
        return Stage("logits", "power", f"{self.exponent:g}")


@dataclass(frozen=True, slots=True)
class Beside(Step):
    """Logits of several products with the same scale, side by side: `cat([q @ k1.mT, q @ k2.mT], -1).softmax(-1)`."""

    products: int

    @property
    def text(self) -> str:
        """The text for a reader that says how many products lie side by side."""
        return Message("trace.step.side_by_side", count=self.products)

    def stage(self) -> Stage:
        return Stage("logits", "joined", self.text)


@dataclass(frozen=True, slots=True)
class Blocks(Step):
    """Logits of several blocks of keys, each with a product of its own, under one softmax."""

    count: int

    def stage(self) -> Stage:
        return Stage("logits", "joined", Message("trace.step.blocks_of_keys", count=self.count))


@dataclass(frozen=True, slots=True, eq=False)
class Mix(Step):
    """Logits mixed over the heads (talking heads, Shazeer et al. 2020, arXiv:2003.02436).

    Head g of the mixed logits is the sum over h of matrix[g, h] times head h.
    """

    matrix: Tensor | None = None  # (H mixed, H), float64; None if its values are unknown

    def write(self, expression: Expression) -> None:
        expression.settle(masks=True)  # masks that were applied before are mixed as well
        expression.wrap("mix")

    def stage(self) -> Stage:
        return Stage("logits", "mix", "over the heads")

    def undo(self, sample: Sample) -> Sample:
        """Return the sample, (B, H, M), multiplied by the inverse matrix along the heads.

        A number that was added to a whole head remains a number per head.
        """
        if self.matrix is None:
            return sample
        return replace(sample, logits=torch.einsum("hg,bgm->bhm", torch.linalg.inv(self.matrix), sample.logits))

    def fixed(self, heads: int, eps: float) -> str | None:
        """Return why mixing can't be undone in logits of `heads` heads and relative rounding `eps`, or None."""
        if self.matrix is None:
            return Message("trace.scale.mixing_unknown")
        if self.matrix.shape != (heads, heads):
            return Message("trace.scale.mixing_heads")
        if not bool(torch.linalg.cond(self.matrix) * eps < _ROUNDING):
            return Message("trace.scale.mixing_inverse")
        return None


@dataclass(frozen=True, slots=True)
class Unknown(Step):
    """An operation that could not be followed, with its name and, for some, a code."""

    name: str
    code: CallFault | Literal["zero_one_factor"] | None = None  # `logits * mask` is such a factor

    def write(self, expression: Expression) -> None:
        expression.lose(self.name)

    def stage(self) -> Stage:
        return Stage("logits", "unknown", self.name)


def scaled_by(steps: Sequence[Step], position: int) -> float | None:
    """Return the product of the numbers that scale the logits after a step, and so what it added too.

    None if it is 1. Factors without a number count as 1. `position` is the index of the step in `steps`.
    """
    factors = (step.factor.value for step in steps[position + 1 :] if isinstance(step, Scale))
    product = math.prod(value for value in factors if value is not None)
    return None if product == 1 else float(product)

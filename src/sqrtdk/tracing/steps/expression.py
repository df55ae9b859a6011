"""A formula while it is written, from the product outwards: a coefficient times an inner text."""

from __future__ import annotations

from collections.abc import Iterable

from sqrtdk.tracing.records import BLOCKS, DATA, ROWS, Factor


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
            self._symbols.append(_symbol(factor))
        elif factor.value is None:
            self._symbols.append("?")
        else:
            self._coefficient *= factor.value

    def add(self, term: str) -> None:
        """Add a term."""
        self.settle()
        self._add(term)

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

    def cap(self, cap: float | None) -> None:
        """Put what is written, the masks too, through cap * tanh(. / cap)."""
        self.settle(masks=True)
        inner = self._written() if self._terms == 1 else f"({self._written()})"
        self._become(f"tanh({inner} / {number(cap)})" if cap not in (None, 1.0) else f"tanh({self._written()})")
        if cap is None:
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
            for mask in self._masks:
                self._add(mask)
            self._masks = []

    def _add(self, term: str) -> None:
        self._inner = f"{self._written()} + {term}"
        self._coefficient, self._symbols, self._terms = 1.0, [], self._terms + 1

    def _become(self, inner: str) -> None:
        self._inner, self._coefficient, self._symbols, self._terms = inner, 1.0, [], 1

    def _written(self) -> str:
        parts = list(self._symbols)
        if self._coefficient != 1.0:
            parts.insert(0, number(self._coefficient))
        if not parts:
            return self._inner
        inner = f"({self._inner})" if self._terms > 1 else self._inner
        return " * ".join([*parts, inner])


def _symbol(factor: Factor) -> str:
    name = factor.source.removeprefix("parameter ").split(".")[-1] if factor.source.startswith("parameter") else "scale"
    return f"{name}[h]" if factor.per_head is not None else name

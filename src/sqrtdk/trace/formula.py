"""Writing the formula that reached the softmax the way a person would: `softmax(0.125 * rope(q).rope(k) + causal)`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sqrtdk.trace.chain import Step
from sqrtdk.trace.lineage import Side
from sqrtdk.trace.masks import BESIDES_MASK
from sqrtdk.trace.records import DATA, Factor


def number(value: float) -> str:
    """Four significant digits, no trailing zeros: 0.125, 0.08839, 1."""
    return f"{value:.4g}"


def side_text(side: Side, letter: str) -> str:
    """`q`, `rms(q)`, `rope(q)`, `rope(l2(q))`, with unknown operations named."""
    text = letter
    named = {"norm", "rope"}
    names = [s.detail if s.name == "norm" else s.name for s in side.stages if s.name in named]
    for name in dict.fromkeys(names):
        text = f"{name or 'norm'}({text})"
    if side.unknown:
        text = f"unknown({', '.join(dict.fromkeys(side.unknown))})({text})"
    return text


class _Expression:
    """A coefficient times an inner text, to which terms can be added."""

    def __init__(self, inner: str) -> None:
        self.inner = inner
        self.coefficient: float | None = 1.0
        self.symbols: list[str] = []
        self.terms = 1

    def scale(self, factor: Factor) -> None:
        if factor.source == DATA:
            self.symbols.append(DATA)
        elif factor.per_head is not None or factor.learned:
            self.symbols.append(_symbol(factor))
        elif factor.value is None:
            self.symbols.append("?")
        else:
            assert self.coefficient is not None
            self.coefficient *= factor.value

    def text(self) -> str:
        parts = list(self.symbols)
        if self.coefficient is not None and self.coefficient != 1.0:
            parts.insert(0, number(self.coefficient))
        if not parts:
            return self.inner
        inner = f"({self.inner})" if self.terms > 1 else self.inner
        return " * ".join([*parts, inner])

    def add(self, term: str) -> None:
        self.inner = f"{self.text()} + {term}"
        self.coefficient, self.symbols, self.terms = 1.0, [], self.terms + 1

    def wrap(self, name: str) -> None:
        self.inner = f"{name}({self.text()})"
        self.coefficient, self.symbols, self.terms = 1.0, [], 1

    def clamp(self, bounds: str) -> None:
        self.inner = f"clamp({self.text()}, {bounds})"
        self.coefficient, self.symbols, self.terms = 1.0, [], 1

    def cap(self, cap: float | None) -> None:
        inner = self.text() if self.terms == 1 else f"({self.text()})"
        self.inner = f"tanh({inner} / {number(cap)})" if cap not in (None, 1.0) else f"tanh({self.text()})"
        self.coefficient, self.symbols, self.terms = cap, [], 1
        if cap is None:
            self.coefficient, self.symbols = 1.0, ["?"]


def _symbol(factor: Factor) -> str:
    name = factor.source.removeprefix("parameter ").split(".")[-1] if factor.source.startswith("parameter") else "scale"
    return f"{name}[h]" if factor.per_head is not None else name


def product_text(query: Side, key: Side) -> str:
    """`q.k`, `rope(q).rope(k)`."""
    return f"{side_text(query, 'q')}.{side_text(key, 'k')}"


def write(
    product: str, factors: Iterable[Factor], steps: Sequence[Step], masks: dict[int, str], extra: Iterable[str]
) -> str:
    """The whole formula.

    Args:
        product: text of the innermost term.
        factors: those applied to q, to k, and by a fused call.
        steps: from the product outwards.
        masks: name of each mask step, by position; a step without a name hides nothing.
        extra: names added last (implicit causal mask, sinks).
    """
    expression = _Expression(product)
    for factor in factors:
        expression.scale(factor)
    named: list[str] = []
    unknown: list[str] = []
    for i, step in enumerate(steps):
        if step.kind == "scale" and step.factor is not None:
            if named:  # a mask came before this factor: show that it is multiplied
                for name in named:
                    expression.add(name)
                named = []
            expression.scale(step.factor)
        elif step.kind == "bias" and step.addend is not None:
            expression.add(step.addend.kind.removesuffix(BESIDES_MASK))
            if i in masks:
                named.append(masks[i])
        elif step.kind == "mask" and i in masks:
            named.append(masks[i])
        elif step.kind == "softcap":
            for name in named:  # a mask inside the cap: shown where it is
                expression.add(name)
            named = []
            expression.cap(step.cap)
        elif step.kind == "clamp":
            expression.clamp(step.name)
        elif step.kind == "unknown":
            unknown.append(step.name)
            if i + 1 == len(steps) or steps[i + 1].kind != "unknown":
                expression.wrap(f"unknown({', '.join(dict.fromkeys(unknown))})")
                unknown = []
    text = expression.text()
    for name in dict.fromkeys([*named, *extra]):
        text = f"{text} + {name}"
    return f"softmax({text})"

"""Exponentials of S1's examples, by their series in rational numbers."""

from fractions import Fraction
from math import factorial


def exponential(x: int) -> float:
    # 48^250 / 250! is below 1e-70: a float lacks nothing
    return float(sum(Fraction(x**k, factorial(k)) for k in range(250)))


def figures() -> dict[str, tuple[float, float]]:
    return {
        "exponential_of_the_upper_end": (exponential(3), 0.0),
        "exponential_of_the_lower_end": (exponential(-3), 0.0),
        "ratio_of_the_ends; side=scaled": (exponential(3 + 3), 0.0),
        "ratio_of_the_ends; side=unscaled": (exponential(24 + 24), 0.0),
    }


if __name__ == "__main__":
    print(*figures().items(), sep="\n")

"""A small set of rows in which every pair of values of every two factors meets."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product

Row = dict[str, str]


def covering(factors: Mapping[str, Sequence[str]], valid: Callable[[Row], bool], seed: int = 0) -> list[Row]:
    """Rows, greedily: each starts from a pair not yet met and takes, factor by factor, what meets most new pairs.

    Args:
        factors: name to values.
        valid: whether a row, perhaps partial, may stand.
        seed: of the order of trials.
    """
    shuffle = random.Random(seed)
    missing = {
        frozenset(((a, x), (b, y)))
        for a, b in combinations(factors, 2)
        for x, y in product(factors[a], factors[b])
        if valid({a: x, b: y})
    }
    rows = []
    while missing:
        start = min(missing, key=sorted)
        row = dict(start)
        others = [name for name in factors if name not in row]
        shuffle.shuffle(others)
        for name in others:
            values = [value for value in factors[name] if valid(row | {name: value})]
            shuffle.shuffle(values)
            row[name] = max(values, key=lambda v: sum(frozenset(((name, v), kept)) in missing for kept in row.items()))
        rows.append({name: row[name] for name in factors})
        missing -= {frozenset(pair) for pair in combinations(row.items(), 2)}
    return rows

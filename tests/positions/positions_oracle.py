"""Every law of positions in plain loops over rows i and keys j, in Python's floats; nothing of the library."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from sqrtdk import positions

B, H, E, MODEL = 2, 3, 4, 10
SHAW_SPAN, SPAN = 3, 4
DEBERTA_BUCKETS, DEBERTA_DISTANCE = 6, 12


def loops(entry: Callable[[int, int, int, int], float], lead: tuple[int, int], rows: Tensor, columns: Tensor) -> Tensor:
    """entry(b, h, i, j), i and j counted from 0, over the block."""
    heads = [
        [[[entry(b, h, i, j) for j in range(len(columns))] for i in range(len(rows))] for h in range(lead[1])]
        for b in range(lead[0])
    ]
    return torch.tensor(heads, dtype=torch.float64).view(*lead, len(rows), len(columns))


def dot(a: Tensor, b: Tensor) -> float:
    return math.fsum(x * y for x, y in zip(a.tolist(), b.tolist(), strict=True))


def through(weight: Tensor, x: Tensor) -> Tensor:
    """W x, by rows."""
    return torch.tensor([dot(row, x) for row in weight], dtype=torch.float64)


def alibi(term: positions.Alibi, q: Tensor, k: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    m = term.slopes.tolist()

    def entry(b: int, h: int, i: int, j: int) -> float:
        distance = rows[i].item() - columns[j].item()
        return -m[h] * (abs(distance) if term.symmetric else distance)

    return loops(entry, q.shape[:2], rows, columns)


def t5_bucket(offset: int, bidirectional: bool, buckets: int, max_distance: int) -> int:
    """In whole numbers: the largest step s with exact (max/exact)^(s/large) <= n, so no logarithm rounds."""
    start = 0
    if bidirectional:
        buckets //= 2
        start = buckets if offset > 0 else 0
        n = abs(offset)
    else:
        n = max(0, -offset)
    exact = buckets // 2
    if n < exact:
        return start + n
    large = buckets - exact
    step = 0
    while step + 1 < large and max_distance ** (step + 1) * exact ** (large - step - 1) <= n**large:
        step += 1
    return start + exact + step


def t5_bias(term: positions.T5Bias, q: Tensor, k: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    table = term.embedding.weight.double()

    def entry(b: int, h: int, i: int, j: int) -> float:
        offset = columns[j].item() - rows[i].item()
        return table[t5_bucket(offset, term.bidirectional, term.num_buckets, term.max_distance), h].item()

    return loops(entry, q.shape[:2], rows, columns)


def shaw(term: positions.Shaw, q: Tensor, k: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    table = term.table.double()

    def entry(b: int, h: int, i: int, j: int) -> float:
        offset = max(-SHAW_SPAN, min(SHAW_SPAN, columns[j].item() - rows[i].item()))
        return dot(q[b, h, i], (table if table.dim() == 2 else table[h])[offset + SHAW_SPAN])

    return loops(entry, q.shape[:2], rows, columns)


def transformer_xl(term: positions.TransformerXL, q: Tensor, k: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    u, v = term.content_bias.double(), term.position_bias.double()
    weight = term.projection.weight.double().view(H, E, MODEL)

    def relative(h: int, n: int) -> Tensor:
        angles = [n / 10000 ** (2 * c / MODEL) for c in range(MODEL // 2)]
        sinusoids = [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
        return through(weight[h], torch.tensor(sinusoids, dtype=torch.float64))

    def entry(b: int, h: int, i: int, j: int) -> float:
        return dot(u[h], k[b, h, j]) + dot(q[b, h, i] + v[h], relative(h, rows[i].item() - columns[j].item()))

    return loops(entry, q.shape[:2], rows, columns)


def deberta_bucket(n: int, buckets: int, max_distance: int) -> int:
    middle = buckets // 2
    if abs(n) <= middle:
        return n
    steps = math.ceil(math.log(abs(n) / middle) / math.log((max_distance - 1) / middle) * (middle - 1))
    return (middle + steps) * (1 if n > 0 else -1)


def deberta(term: positions.Deberta, q: Tensor, k: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    table = term.embedding.double()
    span = DEBERTA_BUCKETS if term.buckets else SPAN

    def projected(module: torch.nn.Linear, h: int, row: int) -> Tensor:
        """A projection runs in its own dtype: where that is not float64, its rounding is not the term's."""
        if module.weight.dtype == torch.float64:
            whole = through(module.weight, table[row]) + module.bias
        else:
            whole = module(term.embedding)[row].double()
        return whole[h * E : (h + 1) * E]

    def entry(b: int, h: int, i: int, j: int) -> float:
        n = rows[i].item() - columns[j].item()
        n = deberta_bucket(n, DEBERTA_BUCKETS, DEBERTA_DISTANCE) if term.buckets else n
        row = max(0, min(2 * span - 1, n + span))
        total = 0.0
        if term.key_proj is not None:
            total += dot(q[b, h, i], projected(term.key_proj, h, row))
        if term.query_proj is not None:
            total += dot(k[b, h, j], projected(term.query_proj, h, row))
        return total

    return loops(entry, q.shape[:2], rows, columns)


def rotated(
    x: list[float], position: float, frequencies: list[float], layout: str, amplitude: float = 1.0
) -> list[float]:
    """One row, pair by pair."""
    half = len(frequencies)
    y = list(x)
    for c, w in enumerate(frequencies):
        first, second = (c, c + half) if layout == "half" else (2 * c, 2 * c + 1)
        cos, sin = amplitude * math.cos(position * w), amplitude * math.sin(position * w)
        y[first] = x[first] * cos - x[second] * sin
        y[second] = x[second] * cos + x[first] * sin
    return y


def yarn_frequencies(
    dim: int, s: float, length: int, base: float, fast: float, slow: float, truncate: bool
) -> list[float]:
    """Channel by channel, from the number of turns within the original length."""
    low, high = (dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in (fast, slow))
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    out = []
    for c in range(dim // 2):
        w = base ** (-2 * c / dim)
        t = min(1.0, max(0.0, (c - low) / (high - low))) if high != low else float(c > low)
        out.append((1 - t) * w + t * w / s)
    return out

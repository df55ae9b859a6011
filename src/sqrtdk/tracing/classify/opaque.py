"""Operations whose computation is not seen: telling by name and shapes those that may be an attention."""

from __future__ import annotations

import re
from collections.abc import Sequence

Shape = tuple[int, ...]
_NAMES = re.compile(r"attn|attention|flash|(?<![a-z])(?:mha|mla)(?![a-z])")


def may_attend(name: str, operands: Sequence[Shape], result: Shape) -> bool:
    """Whether an operation may be an attention: its name says so, or it takes q, k and v, packed or apart.

    Args:
        name: without its namespace.
        operands: shapes of the activations among its operands.
        result: shape of its first output.
    """
    if not operands:
        return False
    if _NAMES.search(name.lower()) or sum(len(shape) >= 2 for shape in operands) >= 3:
        return True
    if any(result in _without(shape, 3) for shape in operands):
        return True  # q, k and v in one tensor
    pairs = [(q, kv) for q in operands for kv in operands if q == result and len(kv) == len(q) + 1 and len(q) >= 3]
    return any(k[-1] == q[-1] for q, kv in pairs for k in _without(kv, 2))


def _without(shape: Shape, packed: int) -> list[Shape]:
    """The shape without each of the axes, the last apart, that hold `packed` tensors."""
    return [shape[:i] + shape[i + 1 :] for i, n in enumerate(shape[:-1]) if n == packed and len(shape) >= 4]

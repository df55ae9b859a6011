"""Which lines of the code a finding is about."""

from __future__ import annotations

import re
from collections.abc import Iterable

from sqrtdk.tracing.records import AttentionCall


def of_scale(call: AttentionCall, mistake: str | None = None) -> str | None:
    """File and line of each factor of the scale; of the product if there is no factor or one is missing.

    Args:
        call: the record.
        mistake: what is wrong with its scale, if that is known.
    """
    factors = () if mistake == "missing" else (factor.at for factor in call.scale.factors)
    return listed(factors) or call.product_at or call.softmax_at


def of_loss(call: AttentionCall) -> str | None:
    """File and line of what could not be followed; of the scale, where everything was."""
    return listed(stage.at or call.softmax_at for stage in call.stages if stage.name == "unknown") or of_scale(call)


def listed(texts: Iterable[str | None], by: str = ", ") -> str | None:
    """The texts that there are, each once."""
    return by.join(dict.fromkeys(text for text in texts if text)) or None


def each(at: str | None) -> tuple[tuple[str, int], ...]:
    """The files and lines of a text, as `listed` made it.

    Example:
        >>> each("a.py:3, b c.py:14")
        (('a.py', 3), ('b c.py', 14))
    """
    return tuple((file, int(line)) for file, line in re.findall(r"(?s)(.+?):(\d{1,9})(?:, |\Z)", at or ""))

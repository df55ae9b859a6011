"""Blocks of keys under one softmax, each with a product of its own: their scales must be the same.

Formula: the effective scale of each block (`AttentionCall.blocks`). Threshold: any two that differ by more than 1%.
Keys that are scaled by more than the others get weight that their content does not earn: fail. Where a learned factor
makes the difference (memories with a gain of their own), it may be meant: warn.
"""

from __future__ import annotations

from collections.abc import Iterable

from sqrtdk.audit.context import Context
from sqrtdk.audit.places import listed
from sqrtdk.audit.records import Finding
from sqrtdk.audit.tolerance import inverse_root

SOURCE = "Milakov & Gimelshein 2018, arXiv:1805.02867: blocks under one softmax are parts of one product"


def check(context: Context) -> Iterable[Finding]:
    """One finding for each call whose blocks of keys have unlike scales."""
    for judged in context.calls:
        call = judged.call
        if judged.verdict != "unexplained" or not call.unlike_blocks:
            continue
        values = [abs(block.scale.effective or 0.0) for block in call.blocks]
        factors = [factor for block in call.blocks for factor in block.scale.factors]
        learned = any(factor.learned for factor in factors)
        yield Finding(
            rule="blocks",
            severity="warn" if learned else "fail",
            site=call.site,
            value=max(values) / min(values) if min(values) else None,
            threshold=1.01,
            message=f"{call.scale.reason}; 1/sqrt({call.head_dim}) is {inverse_root(call.head_dim):.4g}",
            fix="scale the logits of every block by the same number, best by scaling q once before the loop",
            source=SOURCE,
            at=listed(factor.at for factor in factors) or call.product_at,
        )

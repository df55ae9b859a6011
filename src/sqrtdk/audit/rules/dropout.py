"""Dropout of the attention weights in eval mode: two runs of one model differ, and none is the trained one.

Formula: the rate that reached the weights of a call. Threshold: 0, as `nn.Dropout` is the identity in eval mode;
`F.dropout` and SDPA's `dropout_p` are not.
"""

from __future__ import annotations

from collections.abc import Iterable

from sqrtdk.audit.context import Context
from sqrtdk.audit.records import Finding

SOURCE = "Srivastava et al. 2014, section 4: at test time the whole network is used, without dropout"


def check(context: Context) -> Iterable[Finding]:
    """One finding for each call that drops weights; the audit runs in eval mode."""
    for judged in context.calls:
        rate = judged.call.dropout
        if rate > 0 and not context.model.training:
            yield Finding(
                rule="dropout",
                severity="fail",
                site=judged.call.site,
                value=rate,
                threshold=0.0,
                message=f"attention dropout of {rate:g} is on in eval mode",
                fix="pass dropout_p=rate if self.training else 0.0, or training=self.training to F.dropout",
                source=SOURCE,
            )

"""From which error on a stored cache is a finding. All bars are chosen, not measured.

Mean KL of a head's weights, nats: by Pinsker's inequality the weight that moves to other keys is at most sqrt(KL / 2),
a tenth of it at 0.02, 22% at 0.1, half at 0.5. Output, its error relative to its size: about a tenth is what four bits
of Gaussian numbers in groups of 64 lose anyway, and no finding. An outlier is 5 times the median or more.
"""

from __future__ import annotations

from sqrtdk.audit.cache import HeadError

KL_BARS = (("fail", 0.5), ("warn", 0.1), ("note", 0.02))  # worst first
OUTPUT_BARS = (("fail", 0.5), ("warn", 0.25), ("note", 0.15))
OUTLIER = 5.0
HELPS = 0.5  # of the largest mean KL
KL_SOURCE = "chosen; Pinsker: at most sqrt(KL / 2) of the weight moves"
OUTPUT_SOURCE = "chosen: share of the output's size"


def kl_level(error: HeadError) -> tuple[str, float] | None:
    """Severity and bar that the mean KL is beyond; None where it is beyond none."""
    return next((level for level in KL_BARS if error.kl_mean_nats > level[1]), None)


def output_level(error: HeadError) -> tuple[str, float] | None:
    """The same of the output."""
    return next((level for level in OUTPUT_BARS if error.output_error > level[1]), None)


def level(error: HeadError) -> str | None:
    """The worse of the two severities.

    Example:
        >>> level(HeadError(0.2, 0.1, 3.0, 4, 0.6)), level(HeadError(0.001, 0.0, 0.1, 0, 0.02))
        ('fail', None)
    """
    order = [name for name, _ in KL_BARS]
    found = [one[0] for one in (kl_level(error), output_level(error)) if one is not None]
    return min(found, key=order.index, default=None)

"""Rules on the logits of each head: too large, on one key, on too few keys, or the same for every key.

One run shows a level and no trend, so levels that a trained model may have by design are notes or warnings.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import torch
from torch import nn

from sqrtdk.audit.context import Context
from sqrtdk.audit.gains import norm_of_q_and_k, norm_sigma, norm_size
from sqrtdk.audit.records import Finding
from sqrtdk.messages import Message, joined
from sqrtdk.stats.heads import HeadStats
from sqrtdk.theory.gaussian import critical_sigma, expected_entropy_nats
from sqrtdk.tracing.records import AttentionCall

LEAST_KEYS_JUDGED = 16  # in a row; the entropy of shorter rows says little
_NORMALISED = "rules.max_logit.fix_normalised"
MAX_LOGIT_BARS: tuple[
    tuple[str, float, str], ...
] = (  # bars for the largest logit, highest first, with the source's id
    ("critical", 1e4, "sources.threshold.logits_diverge"),
    ("fail", 1e3, "sources.threshold.logits_degrade"),
    ("warn", 100.0, "sources.threshold.qk_clip"),
    ("note", 50.0, "sources.threshold.half_of_qk_clip"),
)
SATURATED_ROWS = 0.5  # share of a head's rows
SATURATED_HEADS = 0.5  # share of the model's heads
PEAK_SOURCE = "sources.threshold.peak"
NOTE_FRACTION = 0.25  # share of the heads whose entropy is low
WARN_FRACTION = 0.75  # the same
SIGMA_SLACK = 1.5  # on the declared deviation: directions of q and k are not quite isotropic, and norms have gains
ENTROPY_SOURCE = "sources.threshold.entropy"
FLAT_FRACTION = 0.999  # entropy of a row over log(keys)
FLAT_STD = 0.1  # standard deviation of a row's logits
FLAT_SHARE = 0.5  # share of the heads that are flat
FLAT_SOURCE = "sources.threshold.flat"
SPREAD_ROUNDINGS = 2.0**-22  # a variance of equal float32 numbers is off by a few roundings of their mean
GAINS_OF_NORMS = ("weight", "gain", "gamma", "scale", "g")  # parameters with one number a channel


def _measured(context: Context) -> Iterator[tuple[int, AttentionCall, HeadStats]]:
    """Yield the calls whose logits were measured, with their places."""
    for place, judged in enumerate(context.calls):
        if judged.call.stats is not None:
            yield place, judged.call, judged.call.stats


def max_logit(context: Context) -> Iterable[Finding]:
    """Report how far the largest logit of each head lies above the mean of its row; the largest logit first.

    Formula: max over rows of the signed logit (scaled, after bias, visible keys only) minus the mean of the row, in
    nats. The mean is subtracted because the softmax ignores what is added to a whole row: under a largest logit of 287,
    a mean of 262 leaves 25. What the 262 costs in bf16 is reported by `range_forecast`. Thresholds: `MAX_LOGIT_BARS`.
    """
    too_large = []
    for place, call, stats in _measured(context):
        finite = [(value, head) for head, value in enumerate(_sizes(call, stats)) if math.isfinite(value)]
        value, head = max(finite, default=(0.0, 0))
        level = next((level for level in MAX_LOGIT_BARS if value > level[1]), None)
        if level is not None:
            words = "above_mean" if value == stats.max_above_mean[head] else "itself"
            too_large.append((context.calls[place], level, value, head, words))
    for judged, (severity, threshold, source), value, head, words in sorted(too_large, key=lambda entry: -entry[2]):
        message = Message(f"rules.max_logit.{words}", head=head, value=f"{value:.4g}")
        # A released model may be like this by design. Only somebody who trains it can do something about it.
        fix = Message(_NORMALISED if norm_of_q_and_k(judged.call) else "rules.max_logit.fix")
        site, index = judged.key
        yield Finding("max_logit", severity, site, value, threshold, message, fix, Message(source), call=index)


def _sizes(call: AttentionCall, stats: HeadStats) -> Sequence[float]:
    """Return for each head the largest logit as the softmax sees it, in nats.

    A bias or a mask of finite numbers (ALiBi's far keys) lowers the mean though no logit grows. In that case the
    smaller of the distance from the mean and of the logit itself counts.
    """
    fill = None if call.mask is None else call.mask.fill
    if call.bias is None and (fill is None or not math.isfinite(fill)):
        return stats.max_above_mean
    return [min(pair) for pair in zip(stats.max_above_mean, stats.max_logit, strict=True)]


def saturation(context: Context) -> Iterable[Finding]:
    """Report heads whose rows put nearly all weight on one key: one finding for each call, the worst first.

    Formula: fraction of rows (two visible keys or more) with peak > 0.99. There the Frobenius norm of the softmax's
    Jacobian diag(p) - p p^T is below 2 p (1 - p) = 0.0198, its value if all other weight is on one other key. The
    gradient of q is that times the spread of the keys, which grows with the logits: it is small, but not zero.
    Thresholds: note if a head has more than half of its rows saturated, warn if most heads of the model have. Healthy
    trained heads may be saturated too: those that park on the first token (attention sinks, Xiao et al. 2023).
    """
    heads = 0
    saturated: dict[int, list[tuple[float, int]]] = {}
    for place, call, stats in _measured(context):
        if call.key_len > 1:  # the weight on a single key is always 1
            heads += stats.heads
            saturated[place] = [(share, h) for h, share in enumerate(stats.saturated) if share > SATURATED_ROWS]
    some = sum(map(len, saturated.values()))
    severity = "warn" if some > SATURATED_HEADS * heads else "note"
    fix, source = Message("rules.saturation.fix"), Message(PEAK_SOURCE)
    for place in sorted(filter(saturated.__getitem__, saturated), key=lambda place: -max(saturated[place])[0]):
        call, (share, head) = context.calls[place].call, max(saturated[place])
        many = Message("rules.saturation.heads", some=len(saturated[place]), heads=call.heads)
        message = joined([many, Message("rules.saturation.worst", head=head, share=f"{100 * share:.0f}")])
        yield Finding("saturation", severity, call.site, share, SATURATED_ROWS, message, fix, source, call=call.index)


@lru_cache(maxsize=256)
def frozen_entropy(keys: int) -> float:
    """Return the expected entropy in nats of a softmax over Gaussian logits at their critical standard deviation.

    Args:
        keys: Number of keys n; the critical standard deviation is sqrt(2 log n).
    """
    return float(expected_entropy_nats(keys, critical_sigma(keys)))


def bar_nats(keys: int, sigma: float) -> float:
    """Return the least entropy in nats that counts as healthy for the attention weights of one query.

    It is the entropy of Gaussian logits at their critical standard deviation, or a lower one if the declared scale
    alone makes the logits wider than that.

    Args:
        keys: Number of visible keys.
        sigma: Standard deviation of the logits that the declared scale gives; 0 if unknown. A slack of 1.5 is applied.
    """
    frozen, widest = frozen_entropy(keys), SIGMA_SLACK * sigma
    return frozen if widest <= critical_sigma(keys) else min(frozen, expected_entropy_nats(keys, widest))


def entropy(context: Context) -> Iterable[Finding]:
    """Report heads that spread their weight over too few keys (entropy collapse): one finding for each call.

    Formula: a head's mean entropy H (nats) against the finite-n expectation H*(n, sigma_c) at the critical standard
    deviation sigma_c = sqrt(2 log n), above which a Gaussian row depends on few keys only (random energy model, Derrida
    1981). Thresholds: heads with n >= 16 keys only; a head is collapsed at H < H*. Note if a quarter of a model's heads
    are collapsed, warn if three quarters are. Collapse goes with instability (Zhai et al. 2023), but a level without
    its trend proves little, so this never fails. If q and k are normalised, the scale alone sets the logits' standard
    deviation: r after an RMS or layer norm, r / d after an l2 norm. A declared one may lie beyond sigma_c; then the bar
    is H* at 1.5 times that deviation.
    """
    heads = 0
    low: dict[int, list[tuple[float, float, float, int]]] = {}
    for place, call, stats in _measured(context):
        known = context.calls[place].verdict in ("exact", "declared")
        sigma = norm_sigma(call.scale.ratio, norm_size(call)) if known else 0.0
        for head, (keys, nats) in enumerate(zip(stats.keys, stats.entropy_nats, strict=True)):
            if math.isfinite(nats) and keys >= LEAST_KEYS_JUDGED:
                heads += 1
                bar = bar_nats(round(keys), sigma)
                if nats < bar:
                    low.setdefault(place, []).append((nats / bar, nats, bar, head))
    some = sum(map(len, low.values()))
    if some < NOTE_FRACTION * heads:
        return
    severity = "warn" if some >= WARN_FRACTION * heads else "note"
    for place in sorted(low, key=lambda place: min(low[place])):
        call, (_, nats, bar, head) = context.calls[place].call, min(low[place])
        many = Message("rules.entropy.heads", some=len(low[place]), heads=call.heads)
        details = Message("rules.entropy.lowest", head=head, entropy=f"{nats:.3g}", bar=f"{bar:.3g}")
        message, fix = joined([many, details]), Message(_NORMALISED if norm_of_q_and_k(call) else "rules.entropy.fix")
        source, index = Message(ENTROPY_SOURCE), call.index
        yield Finding("entropy", severity, call.site, nats, bar, message, fix, source, call=index)


def flat(context: Context) -> Iterable[Finding]:
    """Report heads whose rows average their keys whatever the query, the flattest first; and logits that are all equal.

    Formula: entropy / log(n) of a head, and the within-row standard deviation of its logits. Thresholds: fraction
    > 0.999 at n >= 16 keys and standard deviation < 0.1 (H = log n - sigma^2/2, so both say the same); a note if at
    least half of a trained model's heads are flat. Fresh weights are flat by design (initialiser 0.02): a model in
    which every norm's gain is still a constant is not asked. Equal logits in all rows of all heads are not flat by
    design, also of fresh weights: q or k is zero or the same in every row, as where a buffer was erased. Warn.
    """
    heads = 0
    flat_heads: dict[int, list[tuple[float, float, int]]] = {}
    fix, source = Message("rules.flat.fix"), Message(FLAT_SOURCE)
    for place, call, stats in _measured(context):
        if call.head_dim and all_equal(stats.keys, stats.std_logit, stats.max_abs_logit):
            said = Message("rules.flat.zero" if call.max_product == 0.0 else "rules.flat.equal")
            cure = Message("rules.flat.fix_equal")
            yield Finding("flat", "warn", call.site, 1.0, FLAT_FRACTION, said, cure, source, call=call.index)
            continue
        spread = zip(stats.keys, stats.entropy_fraction, stats.std_logit, strict=True)
        for head, (keys, fraction, std) in enumerate(spread):
            if keys >= LEAST_KEYS_JUDGED:
                heads += 1
                if fraction > FLAT_FRACTION and std < FLAT_STD:
                    flat_heads.setdefault(place, []).append((fraction, std, head))
    if sum(map(len, flat_heads.values())) < FLAT_SHARE * heads or not _trained(context.model):
        return
    for place in sorted(flat_heads, key=lambda place: -max(flat_heads[place])[0]):
        call, (fraction, std, head) = context.calls[place].call, max(flat_heads[place])
        many = Message("rules.flat.heads", some=len(flat_heads[place]), heads=call.heads)
        details = Message("rules.flat.flattest", head=head, fraction=f"{fraction:.5f}", std=f"{std:.2g}")
        message, numbers = joined([many, details]), (fraction, FLAT_FRACTION)
        yield Finding("flat", "note", call.site, *numbers, message, fix, source, call=call.index)


def all_equal(keys: Sequence[float], std: Sequence[float], largest: Sequence[float]) -> bool:
    """Return whether in every head each row's logits are one number, as far as float32 can tell; false of one key.

    Args:
        keys: mean number of visible keys, by head.
        std: within-row standard deviation of the logits, by head.
        largest: largest |logit|, by head.
    """
    heads = list(zip(keys, std, largest, strict=True))
    return bool(heads) and all(n > 1 and s <= SPREAD_ROUNDINGS * size for n, s, size in heads)


def _trained(model: nn.Module) -> bool:
    """Return whether the gain of a norm has learned: it starts as 1 (or 0, where the code adds 1) in every channel."""
    for name, gain in model.named_parameters():
        plain = gain.dim() == 1 and gain.numel() > 1 and gain.is_floating_point() and gain.layout is torch.strided
        named = name.rpartition(".")[2] in GAINS_OF_NORMS
        if plain and named and not gain.is_meta and bool((gain != gain[0]).any()):
            return True
    return False

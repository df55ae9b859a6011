"""Finds the key head that causes the errors of its query heads, the reason, and what removes or halves them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sqrtdk.audit.cache import (
    COARSE,
    CUT_OFF,
    OTHER_HEAD,
    OUTLIERS,
    PRECISION,
    ROWS,
    VALUES,
    Blame,
    KeyHead,
    StoredWay,
)
from sqrtdk.audit.records import SEVERITIES
from sqrtdk.kv.findings import HELPING_SHARE, OUTLIER, kl_level, level
from sqrtdk.messages import Message, joined

_MOST_CHANNELS_NAMED = 4  # channels that one sentence names


def key_heads(key: Tensor, value: Tensor | None = None, limit: float | None = None) -> tuple[KeyHead, ...]:
    """Return how large the channels of k are in each head, and how many numbers exceed the limit of a fixed scale.

    Args:
        key: (B, H, S, E).
        value: (B, H, S, Ev), for the share beyond the limit; None: not counted.
        limit: Largest number under a fixed scale; None: no scale is fixed.

    Example:
        >>> import torch
        >>> k = torch.ones(1, 2, 16, 8)
        >>> k[:, 1, :, 3] = 100.0
        >>> [(head.channel, head.outliers, head.channel_ratio) for head in key_heads(k)]
        [(0, (), 1.0), (3, (3,), 100.0)]
    """
    size = key.abs().amax((0, 2)).double()  # (H, E)
    share = key.double().square().sum((0, 2))
    # A head of zeros has a share of 0 rather than NaN.
    share = share / share.sum(-1, keepdim=True).clamp(min=1e-300)
    rows = key.abs().amax(-1).double()  # (B, H, S)
    largest = size.amax(-1)
    ratios = size / _middle(size)
    beyond, values_beyond = (_beyond(x, limit, key.shape[1]) for x in (key, value))
    described = []
    for head in range(key.shape[1]):
        channel, mine = int(share[head].argmax()), rows[:, head]
        described.append(
            KeyHead(
                head=head,
                largest=float(largest[head]),
                channel=channel,
                channel_share=float(share[head, channel]),
                channel_ratio=float(ratios[head].amax()),
                outliers=tuple(int(i) for i in (ratios[head] >= OUTLIER).nonzero()[:, 0]),
                row=int(mine.amax(0).argmax()),
                row_ratio=float(largest[head] / _middle(mine.flatten())),
                head_ratio=float(largest[head] / _middle(largest)),
                cut_off=beyond[head],
                cut_off_values=values_beyond[head],
            )
        )
    return tuple(described)


def _beyond(x: Tensor | None, limit: float | None, heads: int) -> list[float]:
    """Return the share of each head's numbers that are larger than the limit."""
    if x is None or limit is None:
        return [0.0] * heads
    shares: list[float] = (x.abs() > limit).double().mean((0, 2, 3)).tolist()
    return shares


def _middle(values: Tensor) -> Tensor:
    """Return the median along the last axis, which is kept; of two middle numbers the lower."""
    # The median, as a mean would be pulled up by the very outliers that are looked for.
    return values.median(-1, keepdim=values.dim() > 1).values.clamp(min=1e-300) if values.dim() > 1 else (
        values.median().clamp(min=1e-300)
    )  # fmt: skip


def heads_at_fault(
    stored: StoredWay,
    others: Sequence[StoredWay],
    keys: Sequence[KeyHead],
    seeing: Sequence[int],
    limit: float | None = None,
) -> tuple[Blame, ...]:
    """Return the key heads whose storage in fewer bits causes errors, the worst first.

    Args:
        stored: Errors of the chosen way to store.
        others: Errors of other ways, which show what would help.
        keys: The key heads.
        seeing: Number of rows of each query head that see a key.
        limit: Largest number that the format holds under a fixed scale; None: the scale follows the values.
    """
    group = len(stored.heads) // len(keys)
    suffering: dict[tuple[int, str], list[int]] = {}
    for head in keys:
        mine = range(head.head * group, (head.head + 1) * group)
        # Only heads with an error are blamed: many models have outlier channels that do no harm.
        bad = [i for i in mine if seeing[i] and level(stored.heads[i]) is not None]
        if bad:
            by_kl = any(kl_level(stored.heads[i]) for i in bad)
            # A fixed scale is asked about first: `--cache-scale 1` cuts keys of 900 off at 448 in fp8_e4m3, and these
            # keys look like outliers as well.
            of_the_scale = limit is not None and _is_of_the_scale(bad, stored, others, by_kl=by_kl)
            if of_the_scale and (head.cut_off if by_kl else head.cut_off_values):
                place = head.head, CUT_OFF
            elif of_the_scale and by_kl:
                place = head.head, COARSE
            else:
                place = _cause(head, bad, stored, others, keys) if by_kl else (head.head, VALUES)
            suffering.setdefault(place, []).extend(bad)
    found = [_blame(keys[at], cause, bad, stored, others, limit) for (at, cause), bad in suffering.items()]
    return tuple(sorted(found, key=lambda one: -max(stored.heads[i].kl_mean_nats for i in one.heads)))


def _cause(
    head: KeyHead, bad: Sequence[int], stored: StoredWay, others: Sequence[StoredWay], keys: Sequence[KeyHead]
) -> tuple[int, str]:
    """Return the key head at fault and the cause, from which other ways to store would help."""
    # One scale for all heads, set by another head: a scale for each head would repair this one.
    own = _kl(others, "head", bad)
    largest = max(keys, key=lambda one: one.largest)
    helps = own is not None and own <= HELPING_SHARE * _largest_mean_kl(stored, bad)
    if stored.name == "tensor" and largest is not head and helps:
        return largest.head, OTHER_HEAD
    # A single large number is both an outlier channel and a large row. The storage that helps more decides.
    by_channel = min((x for name in ("channel", "fold") if (x := _kl(others, name, bad)) is not None), default=0.0)
    by_row = _kl(others, "token", bad)
    if head.outliers and head.row_ratio >= OUTLIER and by_row is not None:
        return head.head, OUTLIERS if by_channel <= by_row else ROWS
    if head.outliers:
        return head.head, OUTLIERS
    return head.head, ROWS if head.row_ratio >= OUTLIER else PRECISION


def _is_of_the_scale(bad: Sequence[int], stored: StoredWay, others: Sequence[StoredWay], *, by_kl: bool) -> bool:
    """Return whether scaling by the tensor's own maximum, instead of a fixed scale, at least halves the loss."""
    # A scale taken from the values of the whole tensor differs from the fixed one in nothing else.
    own = next((storage for storage in others if storage.name == "tensor"), None)
    if own is None:
        return False
    if by_kl:
        return _largest_mean_kl(own, bad) <= HELPING_SHARE * _largest_mean_kl(stored, bad)
    return max(own.heads[i].output_error for i in bad) <= HELPING_SHARE * max(stored.heads[i].output_error for i in bad)


def _blame(
    head: KeyHead,
    cause: str,
    bad: Sequence[int],
    stored: StoredWay,
    others: Sequence[StoredWay],
    limit: float | None,
) -> Blame:
    """Return the cause of a key head's errors, with the ways to store that remove them or halve them."""
    # "mended": no error is left above any bar; "helped": the worst error is at most half as large.
    mended = [storage.name for storage in others if all(level(storage.heads[i]) is None for i in bad)]
    half = HELPING_SHARE * _largest_mean_kl(stored, bad)
    helped = [] if cause == VALUES else [storage.name for storage in others if _largest_mean_kl(storage, bad) <= half]
    severities = [severity for i in bad if (severity := level(stored.heads[i])) is not None]
    return Blame(
        key_head=head.head,
        cause=cause,
        heads=tuple(bad),
        severity=max(severities, key=SEVERITIES.index),
        text=_cause_text(head, cause, limit),
        mended_by=tuple(mended),
        helped_by=tuple(name for name in helped if name not in mended),
    )


def _cause_text(head: KeyHead, cause: str, limit: float | None = None) -> str:
    """Return the cause with its numbers, as a sentence."""
    at = head.head
    if cause == CUT_OFF:
        beyond, k, v = f"{limit:.4g}", f"{100 * head.cut_off:.2g}%", f"{100 * head.cut_off_values:.2g}%"
        if not head.cut_off_values:
            return Message("cache.why.k_cut_off", head=at, share=k, limit=beyond)
        if not head.cut_off:
            return Message("cache.why.v_cut_off", head=at, share=v, limit=beyond)
        return Message("cache.why.k_and_v_cut_off", head=at, share=k, other=v, limit=beyond)
    if cause == COARSE:
        return Message("cache.why.coarse_scale", limit=f"{limit:.4g}", head=at, largest=f"{head.largest:.3g}")
    if cause == OUTLIERS:
        return _outliers(head)
    if cause == ROWS:
        return Message("cache.why.large_rows", key=head.row, head=at, ratio=f"{head.row_ratio:.3g}")
    if cause == OTHER_HEAD:
        sets = Message("cache.why.other_head", head=at, ratio=f"{head.head_ratio:.3g}")
        return joined([sets, _outliers(head)]) if head.outliers else sets
    return Message("cache.why.values" if cause == VALUES else "cache.why.precision")


def _outliers(head: KeyHead) -> Message:
    some = ", ".join(str(channel) for channel in head.outliers[:_MOST_CHANNELS_NAMED])
    if len(head.outliers) > _MOST_CHANNELS_NAMED:
        some = Message("cache.why.and_more", some=some, count=len(head.outliers) - _MOST_CHANNELS_NAMED)
    several = len(head.outliers) > 1
    return Message(
        "cache.why.outlier_channels",
        channels=Message("cache.why.channels" if several else "cache.why.channel", channels=some),
        head=head.head,
        ratio=f"{head.channel_ratio:.3g}",
        channel=head.channel,
        share=f"{head.channel_share:.0%}",
    )


def _kl(storages: Sequence[StoredWay], name: str, heads: Sequence[int]) -> float | None:
    """Return the largest mean KL of some heads under one storage; None if it was not computed."""
    storage = next((storage for storage in storages if storage.name == name), None)
    return None if storage is None else _largest_mean_kl(storage, heads)


def _largest_mean_kl(storage: StoredWay, heads: Sequence[int]) -> float:
    return max(storage.heads[i].kl_mean_nats for i in heads)

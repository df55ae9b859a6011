"""What a forecast of a quantised cache yields: frozen records. `sqrtdk.kv` computes them, reports draw them."""

from __future__ import annotations

from dataclasses import dataclass

from sqrtdk._shown import Saved
from sqrtdk.tracing.records import NotMeasured

FOLD, QK_NORM = "fold", "qk_norm"  # ways to store that change more than the grain of the scales
OUTLIERS, ROWS, OTHER_HEAD, PRECISION, VALUES, CUT_OFF, COARSE = (
    "outlier channels",
    "large rows",
    "another head's scale",
    "precision",
    "values",
    "cut off",
    "coarse scale",
)
CAUSES = (OUTLIERS, ROWS, OTHER_HEAD, PRECISION, VALUES, CUT_OFF, COARSE)


@dataclass(frozen=True, slots=True)
class HeadError:
    """What storing k and v so does to one query head, over its rows that see a key.

    Attributes:
        kl_mean_nats: mean over the rows of KL(p || p_stored), p the weights, sinks among the outcomes.
        kl_median_nats: the median.
        kl_max_nats: the largest.
        changed_rows: rows in which a key has the largest weight that had not before.
        output_error: |o_stored - o| / |o|, Euclidean norms over all rows; NaN where o is 0.
    """

    kl_mean_nats: float
    kl_median_nats: float
    kl_max_nats: float
    changed_rows: int
    output_error: float


@dataclass(frozen=True, slots=True)
class StoredWay:
    """One way to store k and v, and what it does to each query head.

    `name` is the grain of the scales ("tensor", "head", "group", "token", "channel", "block"), or the number that they
    are fixed to; "fold": a channel's scale is moved from k into q first; "qk_norm": the attention with q and k
    normalised, stored at the same grain.
    """

    name: str
    heads: tuple[HeadError, ...]

    @property
    def worst(self) -> int:
        """The query head with the largest mean KL."""
        return max(range(len(self.heads)), key=lambda head: self.heads[head].kl_mean_nats)


@dataclass(frozen=True, slots=True)
class KeyHead:
    """What the stored keys of one key head are like.

    Attributes:
        head: its number.
        largest: largest |k|.
        channel: the one with the largest share of the squared norm.
        channel_share: that share; 1 / E where all channels are alike.
        channel_ratio: largest |k| of the largest channel over that of the median channel.
        outliers: channels whose largest |k| is at least `sqrtdk.kv.OUTLIER` times that of the median channel.
        row: the key, 0-based, with the largest |k|.
        row_ratio: its largest |k| over that of the median key.
        head_ratio: `largest` over that of the median key head.
        cut_off: share of the numbers of its k beyond the largest that a fixed scale lets the format store.
        cut_off_values: the same of its v.
    """

    head: int
    largest: float
    channel: int
    channel_share: float
    channel_ratio: float
    outliers: tuple[int, ...]
    row: int
    row_ratio: float
    head_ratio: float
    cut_off: float = 0.0
    cut_off_values: float = 0.0


@dataclass(frozen=True, slots=True)
class Blame:
    """A key head that is at fault, why, and what mends it.

    Attributes:
        key_head: its number.
        cause: one of `CAUSES`.
        heads: the query heads that suffer.
        severity: of the worst of them.
        text: the cause in numbers.
        mended_by: ways to store, by `StoredWay.name`, that bring those heads below every bar.
        helped_by: ways that at least halve the largest mean KL, and leave it above the bar.
    """

    key_head: int
    cause: str
    heads: tuple[int, ...]
    severity: str
    text: str
    mended_by: tuple[str, ...]
    helped_by: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CacheCall:
    """The forecast for one attention.

    Attributes:
        site: module path.
        index: 0-based count of the attentions at this site.
        kv_heads: key heads; query head i reads key head i // (heads / kv_heads).
        head_dim: E.
        key_len: S.
        stored_keys: how many of them, from the first, are stored so; the others are in full precision.
        rows: (batch, position) rows that were computed, evenly spread, the last among them.
        rows_of: of so many.
        seeing_rows: of each query head, those of `rows` that see a key; only these count.
        stored: as it was asked for.
        others: the other grains of the dtype, from coarse to fine, and the remedies.
        keys: one a key head.
        blame: empty if every head is below the bars.
        folded: what channels share a scale when it is folded: "pairs" of a rotation, else "channels".
    """

    site: str
    index: int
    kv_heads: int
    head_dim: int
    key_len: int
    stored_keys: int
    rows: int
    rows_of: int
    seeing_rows: tuple[int, ...]
    stored: StoredWay
    others: tuple[StoredWay, ...]
    keys: tuple[KeyHead, ...]
    blame: tuple[Blame, ...]
    folded: str

    def way(self, name: str) -> StoredWay | None:
        """The way of this name, where it was computed."""
        return next((way for way in (self.stored, *self.others) if way.name == name), None)


@dataclass(frozen=True, slots=True)
class CacheForecast(Saved):
    """The forecast for every attention that ran.

    Attributes:
        dtype: "fp8_e4m3", "fp8_e5m2", "int8", "q8_0" or "int4".
        scale: the grain of its scales, or the number that they are fixed to.
        bits: of one stored number; with its share of a scale where 64 numbers or fewer share one of the format's own.
        source: where the format is defined.
        calls: one for every attention that was computed.
        not_measured: attentions that could not be judged, and why.
        without_cache: those that keep no cache, as every row sees every key.
    """

    dtype: str
    scale: str
    bits: float
    source: str
    calls: tuple[CacheCall, ...]
    not_measured: tuple[NotMeasured, ...] = ()
    without_cache: tuple[NotMeasured, ...] = ()

"""What a forecast of a quantised cache yields: frozen records. `sqrtdk.kv` computes them, reports draw them."""

from __future__ import annotations

from dataclasses import dataclass

from sqrtdk._shown import Saved
from sqrtdk.tracing.records import NotMeasured

FOLD, QK_NORM = "fold", "qk_norm"  # ways to store that change more than the grain of the scales
OUTLIERS, ROWS, OTHER_HEAD, PRECISION, VALUES, CUT_OFF, COARSE = CAUSES = (
    "outlier channels", "large rows", "another head's scale", "precision", "values", "cut off", "coarse scale",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class HeadError:
    """What storing k and v so does to one query head, over its rows that see a key."""

    kl_mean_nats: float  # mean over the rows of KL(p || p_stored), p the weights, sinks among the outcomes
    kl_median_nats: float  # the median
    kl_max_nats: float  # the largest
    changed_rows: int  # rows in which a key has the largest weight that had not before
    output_error: float  # |o_stored - o| / |o|, Euclidean norms over all rows; NaN where o is 0


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
    """What the stored keys of one key head are like."""

    head: int  # its number
    largest: float  # largest |k|
    channel: int  # the one with the largest share of the squared norm
    channel_share: float  # that share; 1 / E where all channels are alike
    channel_ratio: float  # largest |k| of the largest channel over that of the median channel
    # channels whose largest |k| is at least `sqrtdk.kv.OUTLIER` times that of the median channel
    outliers: tuple[int, ...]
    row: int  # the key, 0-based, with the largest |k|
    row_ratio: float  # its largest |k| over that of the median key
    head_ratio: float  # `largest` over that of the median key head
    cut_off: float = 0.0  # share of the numbers of its k beyond the largest that a fixed scale lets the format store
    cut_off_values: float = 0.0  # the same of its v


@dataclass(frozen=True, slots=True)
class Blame:
    """A key head that is at fault, why, and what mends it."""

    key_head: int  # its number
    cause: str  # one of `CAUSES`
    heads: tuple[int, ...]  # the query heads that suffer
    severity: str  # of the worst of them
    text: str  # the cause in numbers
    mended_by: tuple[str, ...]  # ways to store, by `StoredWay.name`, that bring those heads below every bar
    helped_by: tuple[str, ...]  # ways that at least halve the largest mean KL, and leave it above the bar


@dataclass(frozen=True, slots=True)
class CacheCall:
    """The forecast for one attention."""

    site: str  # module path
    index: int  # 0-based count of the attentions at this site
    kv_heads: int  # key heads; query head i reads key head i // (heads / kv_heads)
    head_dim: int  # E
    key_len: int  # S
    stored_keys: int  # how many of them, from the first, are stored so; the others are in full precision
    rows: int  # (batch, position) rows that were computed, evenly spread, the last among them
    rows_of: int  # of so many
    seeing_rows: tuple[int, ...]  # of each query head, those of `rows` that see a key; only these count
    stored: StoredWay  # as it was asked for
    others: tuple[StoredWay, ...]  # the other grains of the dtype, from coarse to fine, and the remedies
    keys: tuple[KeyHead, ...]  # one a key head
    blame: tuple[Blame, ...]  # empty if every head is below the bars
    folded: str  # what channels share a scale when it is folded: "pairs" of a rotation, else "channels"

    def way(self, name: str) -> StoredWay | None:
        """The way of this name, where it was computed."""
        return next((way for way in (self.stored, *self.others) if way.name == name), None)


@dataclass(frozen=True, slots=True)
class CacheForecast(Saved):
    """The forecast for every attention that ran."""

    dtype: str  # "fp8_e4m3", "fp8_e5m2", "int8", "q8_0" or "int4"
    scale: str  # the grain of its scales, or the number that they are fixed to
    # of one stored number; with its share of a scale where 64 numbers or fewer share one of the format's own
    bits: float
    source: str  # where the format is defined
    calls: tuple[CacheCall, ...]  # one for every attention that was computed
    not_measured: tuple[NotMeasured, ...] = ()  # attentions that could not be judged, and why
    without_cache: tuple[NotMeasured, ...] = ()  # those that keep no cache, as every row sees every key

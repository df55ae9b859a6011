"""Frozen records of the forecast for a quantised cache. `sqrtdk.kv` computes them, and reports draw them."""

from __future__ import annotations

from dataclasses import dataclass

from sqrtdk._shown import Saved
from sqrtdk.tracing.records import NotMeasured

FOLD, QK_NORM = "fold", "qk_norm"  # ways to store that change more than how scales are shared
OUTLIERS, ROWS, OTHER_HEAD, PRECISION, VALUES, CUT_OFF, COARSE = CACHE_CAUSES = (
    "outlier channels", "large rows", "another head's scale", "precision", "values", "cut off", "coarse scale",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class HeadError:
    """The error that storing k and v causes in one query head, over its rows that see a key."""

    kl_mean_nats: float  # mean over rows of KL(p || p_stored); p are the weights, with sinks as outcomes
    kl_median_nats: float  # median over rows
    kl_max_nats: float  # maximum over rows
    changed_rows: int  # rows whose key of largest weight changes
    output_error: float  # |o_stored - o| / |o|, Euclidean norms over all rows; NaN where o is 0


@dataclass(frozen=True, slots=True)
class StoredWay:
    """One way to store k and v, and its error in each query head.

    `name` says which numbers share a scale ("tensor", "head", "group", "token", "channel", "block"), or is the number
    that all scales are fixed to. "fold" first moves a channel's scale from k into q. "qk_norm" normalises q and k, and
    stores them like the way that was asked for.
    """

    name: str
    heads: tuple[HeadError, ...]

    @property
    def worst(self) -> int:
        """The 0-based query head with the largest mean KL divergence; the first of several."""
        return max(range(len(self.heads)), key=lambda head: self.heads[head].kl_mean_nats)


@dataclass(frozen=True, slots=True)
class KeyHead:
    """Statistics of the keys of one key head."""

    head: int  # 0-based
    largest: float  # largest |k|
    channel: int  # the channel with the largest share of the squared norm
    channel_share: float  # that share; 1 / E if all channels are alike
    channel_ratio: float  # its largest |k| over that of the median channel
    # Channels whose largest |k| is at least `sqrtdk.kv.OUTLIER` times that of the median channel.
    outliers: tuple[int, ...]
    row: int  # the key, 0-based, with the largest |k|
    row_ratio: float  # its largest |k| over that of the median key
    head_ratio: float  # `largest` over that of the median key head
    cut_off: float = 0.0  # share of k that a fixed scale clips to the largest number of the format
    cut_off_values: float = 0.0  # the same share of v


@dataclass(frozen=True, slots=True)
class Blame:
    """A key head at fault, the cause, and the remedies."""

    key_head: int  # 0-based
    cause: str  # one of `CACHE_CAUSES`
    heads: tuple[int, ...]  # the query heads above a bar
    severity: str  # of the worst of `heads`
    text: str  # the cause in numbers
    mended_by: tuple[str, ...]  # names of ways that bring all of `heads` below every bar
    helped_by: tuple[str, ...]  # names of ways that at least halve the largest mean KL but leave it above the bar


@dataclass(frozen=True, slots=True)
class CacheCall:
    """The forecast for one attention."""

    site: str  # module path
    index: int  # 0-based count of the attentions at this site
    kv_heads: int  # key heads; query head i reads key head i // (heads / kv_heads)
    head_dim: int  # E
    key_len: int  # S
    stored_keys: int  # the first so many keys are stored so; the rest keep full precision
    rows: int  # number of (batch, position) rows computed: evenly spread, including the last
    rows_of: int  # number of all rows
    seeing_rows: tuple[int, ...]  # for each query head, how many of `rows` see a key; only these count
    stored: StoredWay  # the way that was asked for
    others: tuple[StoredWay, ...]  # the other ways of the dtype, from coarse to fine, and the remedies
    keys: tuple[KeyHead, ...]  # one for each key head
    blame: tuple[Blame, ...]  # empty if every head is below the bars
    folded: str  # which channels share a scale when it is folded: "pairs" of a rotation, else "channels"

    def way(self, name: str) -> StoredWay | None:
        """Return the error of one way to store k and v, by its `StoredWay.name` ("token", "fold", ...).

        Returns None if this way was not computed for the attention.
        """
        return next((way for way in (self.stored, *self.others) if way.name == name), None)


@dataclass(frozen=True, slots=True)
class CacheForecast(Saved):
    """The forecast for every attention that ran."""

    dtype: str  # "fp8_e4m3", "fp8_e5m2", "int8", "q8_0" or "int4"
    scale: str  # which numbers share a scale, or the number that all scales are fixed to
    # Bits of one stored number. Includes its share of a scale if at most 64 numbers share a scale of the format itself.
    bits: float
    source: str  # where the format is defined
    calls: tuple[CacheCall, ...]  # one for each attention that was computed
    not_measured: tuple[NotMeasured, ...] = ()  # attentions that could not be judged, with the reason
    without_cache: tuple[NotMeasured, ...] = ()  # attentions that keep no cache, because every row sees every key
    notes: tuple[str, ...] = ()  # what the run changed of the model and could not be put back

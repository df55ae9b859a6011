"""What a trace yields: frozen records, one `AttentionCall` for every attention that ran.

Shapes follow torch: query (B, Hq, L, E), key (B, H, S, E), value (B, H, S, Ev). Logits are in natural-log units.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqrtdk._shown import Shown
from sqrtdk.stats.heads import HeadStats

BY_DATA = "by indices of the data"  # detail of a stage "gather": rows in an order that is not known
WITHOUT_PRODUCT = ("additive", "distance")  # scores that are no product of q and k: there is no scale to judge
ROWS = "rows"  # source of a factor of one number for each row, or key: log n of the keys that it sees
BLOCKS = "blocks"  # source of a factor that differs from one block of keys to the next
DATA = "data"  # source of a factor on the logits that is computed from the inputs: no constant of the model


@dataclass(frozen=True, slots=True)
class Factor:
    """One multiplication on the way from the projections to the softmax.

    `value` is the number, or None if it could not be read (no data on the meta device) or where there are several
    (a factor of the data, one a sequence). `per_head` holds one
    number a head when they differ; `value` is then their geometric mean. `at` is file and line of the multiplication.
    """

    value: float | None
    where: str  # "q", "k", "logits", or "op" (the scale argument of a fused call)
    source: str  # "number", "tensor", "0-d tensor", "parameter attn.logit_scale", "sdpa scale", DATA, ...
    per_head: tuple[float, ...] | None = None
    learned: bool = False
    at: str | None = None

    def text(self) -> str:
        """In few characters: the number, and its source unless it is a number of the code."""
        number = "?" if self.value is None else f"{self.value:.4g}"
        return number if self.source == "number" else f"{number} ({self.source})"


@dataclass(frozen=True, slots=True)
class Stage:
    """One step between projection and values, in order: `where` is "q", "k", "logits" or "weights".

    `at` is file and line, "myport.py:14"; None if they are not known.
    """

    where: str
    name: str  # "projection", "norm", "scale", "rope", "repeat", "product", "softcap", "bias", "mask", "unknown", ...
    detail: str = ""
    at: str | None = None


@dataclass(frozen=True, slots=True)
class Scale:
    """The effective scale: slope of the logits against q_proj(x) . k_proj(x), by two independent readings.

    `symbolic` multiplies the factors along the lineage; `numeric` regresses the real logits on the projections'
    product. `effective` is the symbolic value where there is one, else the numeric one, else None; it is None if an
    operation could not be followed. `ratio` is effective * sqrt(head_dim). `reason` says why something could not be
    read, or that the readings disagree.
    """

    effective: float | None
    ratio: float | None
    symbolic: float | None
    numeric: float | None
    r_squared: float | None
    factors: tuple[Factor, ...]
    per_head: tuple[float, ...] | None = None  # effective scale of each query head where heads differ
    agree: bool | None = None  # None when only one reading exists
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class KeyBlock:
    """Keys whose logits were computed by a product of their own, and its scale."""

    first: int  # 0-based number of its first key
    last: int  # of its last key
    scale: Scale


@dataclass(frozen=True, slots=True)
class Mask:
    """What hides keys, and what came of it. Counts are over (batch, head, query) rows.

    `kind`: "causal" (upper-left), "causal_lower_right", "window", "padding", "mask" (any other pattern or unread).
    `form`: "bool", "float", or "implicit" (is_causal of a fused call). None if the values cannot be read.
    A row i sees keys j from `i - greatest` to `i - least`; `band` says that it sees all of those between.
    """

    kind: str
    form: str
    blind_rows: int | None = None  # rows that see no key
    uniform_rows: int | None = None  # rows whose every key is at finfo.min: softmax averages masked keys
    masked_weight: float | None = None  # largest total weight that a seeing row gives to masked keys
    fill: float | None = None  # value that marks a hidden key, e.g. -inf, finfo.min, -1e4
    scaled_by: float | None = None  # factor that multiplied the mask, when one did
    least: int | None = None  # least i - j of a visible key: -1 where a row sees the key after its own
    greatest: int | None = None  # greatest i - j of a visible key
    band: bool | None = None  # every row sees all keys between, but for padding
    ahead_by_one: int | None = None  # (batch, head) masks in which every row sees the key after its own and no later


@dataclass(frozen=True, slots=True)
class AttentionCall(Shown):
    """One attention: what ran, where, and the formula that reached its softmax."""

    site: str  # module path, e.g. "model.layers.0.self_attn"; "" is the root
    index: int  # 0-based count of the attentions at this site, in order of running
    module_class: str  # class name of the module at `site`
    # "sdpa", "eager", "flex", "compiled" (our kernels), "native" (nn.MultiheadAttention's fast path), "kernel" (an
    # operator of another library), "edge softmax"
    kind: str
    op: str  # the operation that ran it, e.g. "aten._scaled_dot_product_flash_attention_for_cpu"
    score: str  # "dot", "cosine", "disentangled", "relative", "additive", "distance", "unknown(op)"
    batch: int
    heads: int
    kv_heads: int
    head_dim: int  # E of the query without zero padding
    padded_head_dim: int  # E as the product saw it
    value_dim: int
    model_dim: int | None  # input features of the query projection
    query_len: int
    key_len: int
    self_attention: bool | None  # q and k come from the same hidden states
    dtype: str  # of q at the product, e.g. "float32"
    logits_dtype: str  # in which the logits were stored (the accumulator's for a fused kernel)
    device: str
    stages: tuple[Stage, ...]
    formula: str
    scale: Scale
    terms: int = 1  # content-dependent products that were summed (3 for DeBERTa's disentangled score)
    norm: str | None = None  # "rms", "layer", "l2": normalisation of q and k after the projection
    rope: bool = False
    softcap: float | None = None
    bias: str | None = None  # "alibi", "relative", "bias"
    bias_scaled_by: float | None = None  # factor that multiplied the bias, when one did
    mask: Mask | None = None
    sinks: bool = False
    dropout: float = 0.0
    future_weight: float | None = None  # mean weight on keys j > i, where L == S and nothing hides them all
    max_product: float | None = (
        None  # largest |product| as it was stored: before the scale, where the scale comes after
    )
    output_rms: float | None = None  # root mean square of the weights . v product
    unknown: tuple[str, ...] = ()  # operations that the lineage could not follow
    stats: HeadStats | None = None
    stats_reason: str | None = None  # why stats is None
    norm_gain: bool = False  # a gain for each channel, an operation of its own, followed the normalisation of q or k
    shared_qk: bool = False  # q and k are one and the same projection (Reformer), as far as it could be followed
    padding_seen: int | None = None  # (batch, key) of padding that the row of a token sees; None: none, or not known
    tokens_hidden: int | None = None  # (batch, key) of tokens that no row of a token sees; None as above
    axis: str = "positions"  # what keys are: "positions", "windows" (each query has its own), "channels" of q and k
    product_at: str | None = None  # file and line of q . k, or of the kernel's call: "myport.py:14"
    softmax_at: str | None = None  # of the softmax, or of the kernel's call
    blocks: tuple[KeyBlock, ...] = ()  # keys with a product of their own each; none where one product gave all logits

    def __repr__(self) -> str:
        return f"AttentionCall({self.in_short})"

    @property
    def in_short(self) -> str:
        """Site, formula and scale ratio, their text with escapes in place of what has no glyph."""
        site = repr(self.site) + (f" #{self.index}" if self.index else "")
        ratio = "unknown" if self.scale.ratio is None else f"{self.scale.ratio:.4g}"
        return f"{site}, {self.formula!r}, scale ratio {ratio}"

    @property
    def unlike_blocks(self) -> bool:
        """Whether blocks of keys are scaled by unlike numbers; the call has no one scale then."""
        return any(factor.source == BLOCKS for factor in self.scale.factors)


ONE_PROJECTION = "its logits come from one projection: a router or a pooling"
SEPARABLE = "a softmax over the positions of one projection, as in separable attention: a pooling, without q and k"
APART = "a softmax of q, and one of k, apart: efficient attention, without a product of q and k"
NEVER_USED = "its weights never reach a value product"  # they were dropped, or only reduced
NOT_SEEN = "its weights were not seen to reach a value product"  # they met what is not followed
LOST_SIGHT = "its logits are a product of activations, and its weights were not seen to reach values"
LOST_ADDITIVE = "its logits are an additive score of q and k, and its weights were not seen to reach values"
DOUBTFUL = (LOST_SIGHT, LOST_ADDITIVE)  # it may be an attention


@dataclass(frozen=True, slots=True)
class NotAttention:
    """A softmax whose weights never reached a value product, or whose logits are no product of q and k.

    `formula` is what was seen up to the weights, `at` file and line: where they were lost, else the softmax's own.
    """

    site: str
    index: int
    shape: tuple[int, ...]
    reason: str
    formula: str | None = None
    at: str | None = None


@dataclass(frozen=True, slots=True)
class NotMeasured:
    """Something that could not be measured, and why.

    `formula` is what was seen up to the point where it was lost, `at` file and line of that point.
    """

    site: str
    reason: str
    formula: str | None = None
    at: str | None = None

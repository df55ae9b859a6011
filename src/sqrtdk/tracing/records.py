"""The results of a trace: frozen records, one `AttentionCall` for every attention that ran.

Shapes follow torch: query (B, Hq, L, E), key (B, H, S, E), value (B, H, S, Ev). Logits are in natural-log units.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from sqrtdk._shown import Shown
from sqrtdk.messages import Message
from sqrtdk.stats.heads import HeadStats

# How the keys of a row are spread over ranks, so that the attention of one rank has no statistics; "unordered": those
# of all ranks are put together, but not the order of their tokens.
PartOfRow = Literal["gathered", "passed", "summed", "unordered"]
# What is wrong with the steps of an attention.
CallFault = Literal[
    "over_queries",  # the value product sums over the queries, not over the softmax's axis
    "other_axis",  # it sums over another axis, such as the heads
    "other_nodes",  # the values of edges are summed by other groups than their softmax
    "other_sum",  # the weights were divided by a sum over another axis than the softmax's
    "skewed",  # a rotation that does not keep lengths
]
BY_DATA = "by indices of the data"  # detail of a stage "gather": the order of the rows is unknown
DISTANCE_SCORES = ("distance", "laplace")
WITHOUT_PRODUCT = ("additive", *DISTANCE_SCORES)  # scores without a product of q and k, which have no scale to judge
BY_ROW = "rows"  # source of a factor with a number for each row or key, such as log n of the visible keys
# `op` of an attention by exp(z - m) @ v, which is divided by the sum of the exponentials later
IN_BLOCKS = "aten.exp"
BY_BLOCK = "blocks"  # source of a factor that differs between blocks of keys
FROM_DATA = "data"  # source of a factor on the logits that is computed from the inputs, not a constant of the model


class Referable:
    """Base of a class with slots that weak references may point to; Python 3.10 has no `weakref_slot` for it."""

    __slots__ = ("__weakref__",)


@dataclass(frozen=True, slots=True)
class PairDistance:
    """A distance of q and k: |q - k|_order ^ power.

    Attributes:
        order: p of the p-norm, 2 for the Euclidean norm, 1 for the sum of absolute differences; may be infinite.
        power: 1, or 2 for a squared distance.
    """

    order: float
    power: float

    @property
    def text(self) -> str:
        """What stands after |q - k| in a formula: "", "^2", "_1"."""
        norm = "" if self.order == 2 else f"_{self.order:g}"
        return norm + ("" if self.power == 1 else f"^{self.power:g}")

    @property
    def name(self) -> str:
        """Name of the score that is its negative: "laplace" for the sum of differences, else "distance"."""
        return "laplace" if (self.order, self.power) == (1.0, 1.0) else "distance"


@dataclass(frozen=True, slots=True)
class Factor:
    """One multiplication between the projections and the softmax.

    `value` is None if it could not be read (the meta device has no data), or if it differs between rows or sequences.
    If heads differ, `per_head` holds one number per head and `value` is their geometric mean. `at` is the file and line
    of the multiplication.
    """

    value: float | None
    where: str  # "q", "k", "logits", or "op" (the scale argument of a fused call)
    source: str  # "number", "tensor", "0-d tensor", "parameter attn.logit_scale", "sdpa scale", DATA, ...
    per_head: tuple[float, ...] | None = None
    learned: bool = False
    at: str | None = None

    def text(self) -> str:
        """Return the number with four significant digits, "?" if unknown, and its source: "0.125 (sdpa scale)".

        The source is left out for a literal in the code.
        """
        number = "?" if self.value is None else f"{self.value:.4g}"
        return number if self.source == "number" else f"{number} ({self.source})"


@dataclass(frozen=True, slots=True)
class Stage:
    """One step between the projections and the product with the values.

    `where` is "q", "k", "logits" or "weights". `at` is the file and line, such as "myport.py:14", or None if unknown.
    """

    where: str
    name: str  # "projection", "norm", "scale", "rope", "repeat", "product", "softcap", "bias", "mask", "unknown", ...
    detail: str = ""
    at: str | None = None


@dataclass(frozen=True, slots=True)
class EffectiveScale:
    """The effective scale, which is the slope of the logits against q_proj(x) . k_proj(x), read in two ways.

    `symbolic` is the product of the factors along the lineage. `numeric` is the slope of a regression of the logits on
    the product of the projections. `effective` is the symbolic value, else the numeric one; it is None if neither is
    known or an operation could not be followed. `ratio` is effective * sqrt(head_dim). `reason` explains a missing
    value or a disagreement.
    """

    effective: float | None
    ratio: float | None
    symbolic: float | None
    numeric: float | None
    r_squared: float | None
    factors: tuple[Factor, ...]
    per_head: tuple[float, ...] | None = None  # effective scale of each query head, if heads differ
    agree: bool | None = None  # None when only one reading exists
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class KeyBlock:
    """A block of consecutive keys whose logits come from a separate product, and the scale of that product."""

    first: int  # 0-based index of the first key
    last: int  # index of the last key
    scale: EffectiveScale


@dataclass(frozen=True, slots=True)
class Mask:
    """The mask of an attention and its effect. Counts are over (batch, head, query) rows; None means not known.

    `kind` is "causal" (upper-left), "causal_lower_right", "window", "padding", or "mask" (any other pattern, or values
    that could not be read). `form` is "bool", "float", or "implicit" (is_causal of a fused call). Row i sees keys j
    from `i - greatest` to `i - least`; `band` says that it sees all keys between these.
    """

    kind: str
    form: str
    blind_rows: int | None = None  # rows that see no key
    uniform_rows: int | None = None  # rows with every key at finfo.min: the softmax averages over masked keys
    masked_weight: float | None = None  # largest total weight on masked keys among rows that see a key
    fill: float | None = None  # value that marks a hidden key, e.g. -inf, finfo.min, -1e4
    scaled_by: float | None = None  # factor that multiplied the mask; None if there was none
    least: int | None = None  # least i - j of a visible key: -1 if a row sees the key after its own
    greatest: int | None = None  # greatest i - j of a visible key
    band: bool | None = None  # every row sees all keys between these, except padding
    ahead_by_one: int | None = None  # (batch, head) masks in which every row sees exactly one key past its own

    def is_band(self, least: int, greatest: int) -> bool:
        """Return whether row i sees the keys j with least <= i - j <= greatest and no others, apart from padding."""
        return (self.least, self.greatest, self.band) == (least, greatest, True)


@dataclass(frozen=True, slots=True)
class AttentionCall(Shown):
    """One attention: what ran, where, and the formula that reached its softmax."""

    site: str  # module path, e.g. "model.layers.0.self_attn"; "" is the root
    index: int  # 0-based index among the attentions at this site, in order of execution
    module_class: str  # class name of the module at `site`
    # "sdpa", "eager", "flex", "compiled" (our kernels), "native" (nn.MultiheadAttention's fast path), "kernel" (an
    # operator of another library), "edge softmax"
    kind: str
    op: str  # the operation that ran it, e.g. "aten._scaled_dot_product_flash_attention_for_cpu"
    score: str  # "dot", "cosine", "disentangled", "relative", "additive", "distance", "laplace", "unknown(op)"
    batch: int
    heads: int
    kv_heads: int
    head_dim: int  # E of the query without zero padding
    padded_head_dim: int  # E of the product, with zero padding
    value_dim: int
    model_dim: int | None  # input features of the query projection
    query_len: int
    key_len: int
    self_attention: bool | None  # q and k come from the same hidden states
    dtype: str  # of q at the product, e.g. "float32"
    logits_dtype: str  # of the stored logits; of the accumulator in a fused kernel
    device: str
    stages: tuple[Stage, ...]
    formula: str
    scale: EffectiveScale
    terms: int = 1  # content-dependent products that were summed (3 for DeBERTa's disentangled score)
    norm: str | None = None  # "rms", "layer", "l2": normalisation of q and k after the projection
    rope: bool = False
    softcap: float | None = None
    bias: str | None = None  # "alibi", "relative", "bias"
    bias_scaled_by: float | None = None  # factor that multiplied the bias; None if there was none
    mask: Mask | None = None
    sinks: bool = False
    dropout: float = 0.0
    future_weight: float | None = None  # mean weight on keys j > i, if L == S and no mask hides all of them
    max_product: float | None = None  # largest |product| as stored; it excludes a scale that is applied afterwards
    output_rms: float | None = None  # root mean square of the weights . v product
    unknown: tuple[str, ...] = ()  # operations that the lineage could not follow
    stats: HeadStats | None = None
    stats_reason: str | None = None  # why stats is None
    norm_gain: bool = False  # q or k was multiplied by a gain per channel after a separate normalisation
    shared_qk: bool = False  # q and k are the same projection (Reformer), as far as it could be followed
    padding_seen: int | None = None  # (batch, key) pairs of padding seen by a token's row; None: no padding known
    tokens_hidden: int | None = None  # (batch, key) pairs of tokens hidden from every token's row; None as above
    axis: str = "positions"  # what keys are: "positions", "windows" (each query has its own), "channels" of q and k
    product_at: str | None = None  # file and line of q . k, or of the kernel's call: "myport.py:14"
    softmax_at: str | None = None  # file and line of the softmax, or of the kernel's call
    blocks: tuple[KeyBlock, ...] = ()  # blocks of keys with separate products; () if one product gave all logits
    # Rows have other keys on other ranks, so that the mask has no verdict, and mostly there are no statistics.
    part_of_row: PartOfRow | None = None
    faults: tuple[CallFault, ...] = ()

    def __repr__(self) -> str:
        return f"AttentionCall({self.in_short})"

    @property
    def in_short(self) -> str:
        """The site, the formula and the scale ratio in one line; unprintable characters are escaped."""
        site = repr(self.site) + (f" #{self.index}" if self.index else "")
        ratio = "unknown" if self.scale.ratio is None else f"{self.scale.ratio:.4g}"
        return f"{site}, {self.formula!r}, scale ratio {ratio}"

    @property
    def unlike_blocks(self) -> bool:
        """Whether blocks of keys have different scales, in which case the call has no single scale."""
        return any(factor.source == BY_BLOCK for factor in self.scale.factors)


# Why a softmax is not an attention.
NotAttentionCode = Literal[
    "one_projection",  # the logits come from one projection: a router, a pooling
    "of_edges",  # the same, over the edges of a graph
    "nested_logits",  # the product behind nested logits is unknown
    "separable",  # the weights pool the positions of one projection
    "apart",  # softmax(q) @ (softmax(k).mT @ v)
    "positional",  # no product of q and k, mixed into the weights of an attention
    "never_used",  # the weights were dropped, or only reduced
    "not_seen",  # the weights entered an operation that is not followed
    "lost_sight",  # the same, and the logits are a product of activations
    "lost_additive",  # the same, and the logits are an additive score of q and k
]
_MAYBE_ATTENTION = ("lost_sight", "lost_additive")
# Why an attention was not measured, where a decision hangs on it.
NotMeasuredCode = Literal[
    "without_softmax",  # such as linear attention
    "picks_keys",  # scores that meet no values: an indexer
    "idle",  # a module that did not run
    "unfound",  # a module that ran, in which no attention was found
    "other_run",  # it was measured; another run, which would show more, failed
]


def why_not_attention(code: NotAttentionCode) -> Message:
    """Return the sentence for a code.

    Example:
        >>> why_not_attention("never_used")
        'its weights never reach a value product'
    """
    if code == "nested_logits":
        return Message("trace.fault.nested_logits")
    why = {"why": Message("trace.not_attention.one_projection")} if code == "of_edges" else {}
    return Message(f"trace.not_attention.{code}", **why)


@dataclass(frozen=True, slots=True)
class NotAttention:
    """A softmax whose weights never reached a value product, or whose logits are not a product of q and k.

    `formula` covers the operations up to the weights. `at` is the file and line where the weights were lost, else that
    of the softmax.
    """

    site: str
    index: int
    shape: tuple[int, ...]
    reason: str
    formula: str | None = None
    at: str | None = None
    code: NotAttentionCode | None = None

    @property
    def doubtful(self) -> bool:
        """Whether it may still be an attention: its logits are scores of q and k, and its weights were lost."""
        return self.code in _MAYBE_ATTENTION

    @property
    def unused(self) -> bool:
        """Whether its weights were not seen to reach a value product."""
        return self.code in ("never_used", "not_seen", *_MAYBE_ATTENTION)


@dataclass(frozen=True, slots=True)
class NotMeasured:
    """An attention, or a part of one, that could not be measured, and the reason.

    `formula` covers the operations up to the point where the reading stopped; `at` is file and line of that point.
    """

    site: str
    reason: str
    formula: str | None = None
    at: str | None = None
    code: NotMeasuredCode | None = None

    @property
    def without_softmax(self) -> bool:
        """Whether it is known as an attention that has no softmax, such as linear attention."""
        return self.code in ("without_softmax", "picks_keys")


class Missed:
    """Attentions that could not be measured, one for each site, reason and line of code: the first.

    A recurrence in Python meets values in the same line at every step, each time with a longer formula.

    Attributes:
        formulas: whether formulas are read; without them only their number is of use.
    """

    def __init__(self, *, formulas: bool = True) -> None:
        self.formulas = formulas
        self._first: dict[tuple[str, str, str | None], NotMeasured] = {}

    def add(
        self,
        site: str,
        reason: str,
        at: str | None,
        formula: Callable[[], str | None],
        code: NotMeasuredCode | None = None,
    ) -> None:
        """List an attention that could not be measured.

        Args:
            site: module path.
            reason: why it could not be measured.
            at: file and line, such as "myport.py:14"; None if they are unknown, and then the formula stands for them.
            formula: returns the formula. As it is costly, it is called only for the first attention of a line.
            code: the code of the reason, if there is one.
        """
        if at is None:  # no line is known: the formula stands for it
            written = formula()
            self._first.setdefault((site, reason, written), NotMeasured(site, reason, written, code=code))
        elif (site, reason, at) not in self._first:
            self._first[site, reason, at] = NotMeasured(site, reason, formula() if self.formulas else None, at, code)

    def entries(self, sites: Iterable[str]) -> tuple[NotMeasured, ...]:
        """Return the listed attentions, in the order in which they were added.

        Scores that pick keys are left out unless an attention is around them. A graph of neighbours, `relu(a @
        b.mT).topk(3)`, is none.

        Args:
            sites: module paths of the attentions that were measured; listed ones count as well.
        """
        every = tuple(self._first.values())
        around = {*sites, *(entry.site for entry in every if entry.code != "picks_keys")}
        return tuple(
            entry
            for entry in every
            if entry.code != "picks_keys" or any(f"{entry.site}.".startswith(f"{s}." if s else s) for s in around)
        )


def numbers_by_site(sites: Iterable[str]) -> Iterator[int]:
    """Yield, for each of the sites in order, how often the same site occurred before it.

    Example:
        >>> list(numbers_by_site(["a", "b", "a"]))
        [0, 0, 1]
    """
    count: Counter[str] = Counter()
    for site in sites:
        yield count[site]
        count[site] += 1

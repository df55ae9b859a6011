"""Parameters of attention, counted by formula, and the table of well-known models.

h query heads, kv key and value heads, d_k and d_v channels of one of them, d_model channels of the residual stream.
Vaswani et al. 2017 (arXiv:1706.03762, section 3.2.2) have d_k = d_v = d_model / h and no biases: 3 h d_model d_k for
the projections in, and d_model^2 for the one out.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqrtdk.theory._numeric import whole_number


@dataclass(frozen=True, slots=True)
class Terms:
    """A sum of named terms, each with its value in parameters.

    Example:
        >>> both = Terms((("a b", 6),)) + Terms((("a", 2),))
        >>> both.formula, both.total
        ('a b + a', 8)
    """

    parts: tuple[tuple[str, int], ...] = ()

    @property
    def formula(self) -> str:
        """The sum in symbols; "0" if there is no term."""
        return " + ".join(text for text, _ in self.parts) or "0"

    @property
    def total(self) -> int:
        """The sum in parameters."""
        return sum(value for _, value in self.parts)

    def __add__(self, other: Terms) -> Terms:
        """Both sums in one."""
        return Terms(self.parts + other.parts)


def multi_head_terms(
    d_model: int,
    heads: int,
    *,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    value_head_dim: int | None = None,
    kdim: int | None = None,
    vdim: int | None = None,
    in_bias: bool = True,
    out_bias: bool = True,
) -> Terms:
    """Parameters of multi-head attention: h d_k d_model + kv d_k kdim + kv d_v vdim + h d_v d_model, and biases.

    The biases are h d_k + kv d_k + kv d_v (in) and d_model (out). Exact for a layer of these four projections. Norms of
    q and k, learned scales and relative positions add to it, and low-rank projections have another sum.

    Args:
        d_model: channels of the query and of the output.
        heads: query heads h.
        kv_heads: key and value heads kv; None: h.
        head_dim: d_k; None: d_model / h, rounded down.
        value_head_dim: d_v; None: d_k.
        kdim: channels of the key; None: d_model.
        vdim: channels of the value; None: d_model.
        in_bias: whether the projections of query, key and value have biases.
        out_bias: whether the output's projection has one.

    Returns:
        The terms, in parameters; equal ones are combined: the textbook case reads `3 h d_k d_model + d_model^2`.

    Raises:
        InvalidTypeError: A size is not a whole number.
        InvalidValueError: A size is below 1, including a derived one: d_model / h without a head_dim.

    Example:
        >>> terms = multi_head_terms(512, 8, in_bias=False, out_bias=False)
        >>> terms.formula, terms.total
        ('3 h d_k d_model + d_model^2', 1048576)
        >>> multi_head_terms(4096, 32, kv_heads=8, in_bias=False, out_bias=False).formula
        'h d_k d_model + 2 kv d_k d_model + d_model^2'

    Reference:
        Vaswani et al. 2017, arXiv:1706.03762; Ainslie et al. 2023, arXiv:2305.13245 for fewer key heads.
    """
    d_model, heads = whole_number(d_model, "d_model", 1), whole_number(heads, "heads", 1)
    kv = whole_number(heads if kv_heads is None else kv_heads, "kv_heads", 1)
    d_k = whole_number(d_model // heads if head_dim is None else head_dim, "head_dim", 1)
    d_v = whole_number(d_k if value_head_dim is None else value_head_dim, "value_head_dim", 1)
    from_key = whole_number(d_model if kdim is None else kdim, "kdim", 1)
    from_value = whole_number(d_model if vdim is None else vdim, "vdim", 1)
    value = "d_k" if d_v == d_k else "d_v"
    if (from_key, from_value, d_v, kv) == (d_model, d_model, d_k, heads):
        parts = [("3 h d_k d_model", 3 * heads * d_k * d_model)]
    elif (from_key, from_value, d_v) == (d_model, d_model, d_k):
        parts = [("h d_k d_model", heads * d_k * d_model), ("2 kv d_k d_model", 2 * kv * d_k * d_model)]
    else:
        few = "h" if kv == heads else "kv"
        parts = [
            ("h d_k d_model", heads * d_k * d_model),
            (f"{few} d_k {'d_model' if from_key == d_model else 'kdim'}", kv * d_k * from_key),
            (f"{few} {value} {'d_model' if from_value == d_model else 'vdim'}", kv * d_v * from_value),
        ]
    square = heads * d_v == d_model
    parts.append(("d_model^2" if square else f"h {value} d_model", heads * d_v * d_model))
    if in_bias:
        parts.append(_in_biases(heads, kv, d_k, d_v))
    if out_bias:
        parts.append(("d_model", d_model))
    return Terms(tuple(parts))


def _in_biases(heads: int, kv: int, d_k: int, d_v: int) -> tuple[str, int]:
    few = "h" if kv == heads else "kv"
    number = heads * d_k + kv * d_k + kv * d_v
    if d_v != d_k:
        return f"(h d_k + {few} d_k + {few} d_v)", number
    return "3 h d_k" if kv == heads else "(h + 2 kv) d_k", number


def additive_terms(query_dim: int, key_dim: int, hidden: int, *, bias: bool = False) -> Terms:
    """Parameters of an additive score: d_q A + d_key A + A, plus A for a bias.

    Args:
        query_dim: d_q, channels of the query.
        key_dim: d_key, channels of the key.
        hidden: A, width of the hidden layer.
        bias: whether the hidden layer has one.

    Returns:
        The terms, in parameters: of W_q, W_k and v of v^T tanh(W_q q + W_k k).

    Raises:
        InvalidTypeError: a size is not a whole number.
        InvalidValueError: a size is below 1.

    Example:
        >>> additive_terms(4, 6, 8).total
        88

    Reference:
        Bahdanau et al. 2014, arXiv:1409.0473, appendix A.1.2.
    """
    query_dim, key_dim = whole_number(query_dim, "query_dim", 1), whole_number(key_dim, "key_dim", 1)
    hidden = whole_number(hidden, "hidden", 1)
    parts = (("d_q A", query_dim * hidden), ("d_key A", key_dim * hidden), ("A", hidden))
    return Terms((*parts, ("A", hidden)) if bias else parts)


def bilinear_terms(query_dim: int, key_dim: int, *, heads: int | None = None) -> Terms:
    """Parameters of a bilinear score: d_q d_key, times h if each head has its own form.

    Args:
        query_dim: d_q, channels of the query.
        key_dim: d_key, channels of the key.
        heads: h; None: one form for all heads.

    Returns:
        The terms, in parameters: of W of q^T W k.

    Raises:
        InvalidTypeError: a size is not a whole number.
        InvalidValueError: a size is below 1.

    Example:
        >>> bilinear_terms(4, 6, heads=2).formula
        'h d_q d_key'

    Reference:
        Luong et al. 2015, arXiv:1508.04025, section 3.1 (general).
    """
    one = whole_number(query_dim, "query_dim", 1) * whole_number(key_dim, "key_dim", 1)
    if heads is None:
        return Terms((("d_q d_key", one),))
    return Terms((("h d_q d_key", whole_number(heads, "heads", 1) * one),))


@dataclass(frozen=True, slots=True)
class Layers:
    """Equal attention layers of a model.

    Attributes:
        name: of the kind of layer.
        count: number of layers.
        d_model: channels of the residual stream.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: d_k = d_v.
        bias: whether all four projections have biases.
        once: parameters that only one of the layers holds, as (formula, number).
    """

    name: str
    count: int
    d_model: int
    heads: int
    kv_heads: int
    head_dim: int
    bias: bool = False
    once: tuple[tuple[str, int], ...] = ()

    @property
    def each(self) -> Terms:
        """Parameters of one layer, without `once`."""
        return multi_head_terms(
            self.d_model,
            self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            in_bias=self.bias,
            out_bias=self.bias,
        )

    @property
    def total(self) -> int:
        """Parameters of all these layers."""
        return self.count * self.each.total + Terms(self.once).total


@dataclass(frozen=True, slots=True)
class Preset:
    """The attention layers of a published model.

    Attributes:
        layers: of each kind.
        parameters: of the whole model, counting tied weights once.
        source: publication of the sizes.
    """

    layers: tuple[Layers, ...]
    parameters: int
    source: str

    @property
    def attention(self) -> int:
        """Parameters of all attention layers."""
        return sum(layers.total for layers in self.layers)


def _stack(count: int, d_model: int, heads: int, kv_heads: int, bias: bool) -> tuple[Layers, ...]:
    return (Layers("self-attention", count, d_model, heads, kv_heads, d_model // heads, bias),)


_T5_BUCKETS = (("32 h", 32 * 8),)
_T5_SMALL = (
    Layers("encoder self-attention", 6, 512, 8, 8, 64, once=_T5_BUCKETS),
    Layers("decoder self-attention", 6, 512, 8, 8, 64, once=_T5_BUCKETS),
    Layers("decoder cross-attention", 6, 512, 8, 8, 64),
)

_GPT2 = "Radford et al. 2019, table 2; heads: hparams.json of the released weights"
_LLAMA2 = "arXiv:2307.09288, section 2.2 (as Llama 1); arXiv:2302.13971, table 2"

# Sizes of the published configs; parameters are counted with the output matrix tied if the model ties it, and for BERT
# with the pooler.
PRESETS: dict[str, Preset] = {
    "gpt2": Preset(_stack(12, 768, 12, 12, True), 124_439_808, _GPT2),
    "gpt2-medium": Preset(_stack(24, 1024, 16, 16, True), 354_823_168, _GPT2),
    "gpt2-large": Preset(_stack(36, 1280, 20, 20, True), 774_030_080, _GPT2),
    "gpt2-xl": Preset(_stack(48, 1600, 25, 25, True), 1_557_611_200, _GPT2),
    "llama-2-7b": Preset(_stack(32, 4096, 32, 32, False), 6_738_415_616, _LLAMA2),
    "llama-3-8b": Preset(_stack(32, 4096, 32, 8, False), 8_030_261_248, "arXiv:2407.21783, table 3"),
    "llama-3-70b": Preset(_stack(80, 8192, 64, 8, False), 70_553_706_496, "arXiv:2407.21783, table 3"),
    "mistral-7b": Preset(_stack(32, 4096, 32, 8, False), 7_241_732_096, "arXiv:2310.06825, table 1"),
    "bert-base": Preset(_stack(12, 768, 12, 12, True), 109_482_240, "arXiv:1810.04805, section 3"),
    "bert-large": Preset(_stack(24, 1024, 16, 16, True), 335_141_888, "arXiv:1810.04805, section 3"),
    "t5-small": Preset(_T5_SMALL, 60_506_624, "arXiv:1910.10683, section 3.7"),
}

"""The fields of a call, to be read on what holds the call: `judged.site` is `judged.call.site`."""

from __future__ import annotations

from typing import Any, Generic, TypeVar, cast

from sqrtdk.stats.heads import HeadStats
from sqrtdk.tracing.records import KeyBlock, Mask, Scale, Stage

T = TypeVar("T")


class _OfCall(Generic[T]):
    """A field of the record that `call` is, by the name that it has here."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, record: Any, owner: type) -> T:
        return cast(T, self if record is None else getattr(record.call, self.name))


class CallFields:
    """Every field of `AttentionCall`, read of `call`."""

    __slots__ = ()

    site = _OfCall[str]()
    index = _OfCall[int]()
    module_class = _OfCall[str]()
    kind = _OfCall[str]()
    op = _OfCall[str]()
    score = _OfCall[str]()
    batch = _OfCall[int]()
    heads = _OfCall[int]()
    kv_heads = _OfCall[int]()
    head_dim = _OfCall[int]()
    padded_head_dim = _OfCall[int]()
    value_dim = _OfCall[int]()
    model_dim = _OfCall[int | None]()
    query_len = _OfCall[int]()
    key_len = _OfCall[int]()
    self_attention = _OfCall[bool | None]()
    dtype = _OfCall[str]()
    logits_dtype = _OfCall[str]()
    device = _OfCall[str]()
    stages = _OfCall[tuple[Stage, ...]]()
    formula = _OfCall[str]()
    scale = _OfCall[Scale]()
    terms = _OfCall[int]()
    norm = _OfCall[str | None]()
    rope = _OfCall[bool]()
    softcap = _OfCall[float | None]()
    bias = _OfCall[str | None]()
    bias_scaled_by = _OfCall[float | None]()
    mask = _OfCall[Mask | None]()
    sinks = _OfCall[bool]()
    dropout = _OfCall[float]()
    future_weight = _OfCall[float | None]()
    max_product = _OfCall[float | None]()
    output_rms = _OfCall[float | None]()
    unknown = _OfCall[tuple[str, ...]]()
    stats = _OfCall[HeadStats | None]()
    stats_reason = _OfCall[str | None]()
    norm_gain = _OfCall[bool]()
    shared_qk = _OfCall[bool]()
    padding_seen = _OfCall[int | None]()
    tokens_hidden = _OfCall[int | None]()
    axis = _OfCall[str]()
    product_at = _OfCall[str | None]()
    softmax_at = _OfCall[str | None]()
    blocks = _OfCall[tuple[KeyBlock, ...]]()

"""Which first tokens of the inputs may stand for all of them, and whether a run of these did the same.

What two runs of a model are compared for does not depend on the number of tokens as long as the model does the same
with fewer. The inputs are cut only if

- they were made for the model: what a user gives may show its fault at the end, and has documents and padding;
- every tensor has a row for each token, so that no image or audio loses its place;
- no number of the config by which tokens are counted (`sliding_window`, `chunk_size`,
  `original_max_position_embeddings`) lies between the two lengths, and no expert has a capacity;
- every attention was read, the same ones run, and every row sees the same keys: all of them, all before it, or those in
  a window that is reached by the first tokens as well.

Nothing is found by the first tokens: whatever they show that is to be reported is asked of the whole inputs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from sqrtdk.audit.configs import own_fields
from sqrtdk.models.records import Inputs, LoadedModel
from sqrtdk.tracing.records import AttentionCall, Mask

# Numbers of tokens, of which the first is taken that is no size of a head and no number of heads.
LENGTHS = (16, 18, 20, 22, 14)
_LEAST_GAIN = 2  # times as many tokens as the first, or the inputs are not cut
_COUNTS_TOKENS = re.compile(
    r"^(?!(max|min)_length$|num_local_experts$|.*layers?$)"
    r".*(window|chunk|block|stride|segment|span|local|landmark|position|length|seq_len|compress)"
)
_CAPACITY = "capacity"  # of an expert: it counts the tokens of a whole batch
_DEEPEST_CONFIG = 4  # levels of configs inside configs
_IDS = re.compile(r"(^|_)ids$")


def in_a_band(call: AttentionCall) -> bool:
    """Return whether the keys that each query of a call sees depend on their distance alone.

    That is so without a mask and with a mask that shows all keys between two distances (causal, sliding window). It is
    not for masks of blocks and for keys that are selected by the data.
    """
    return call.axis == "positions" and (call.mask is None or call.mask.band is True)


def tokens_of_each(inputs: Mapping[str, Any], shape: Sequence[int]) -> int | None:
    """Return the number of tokens n if every tensor has a row for each token, (B, n, ...), or None.

    Args:
        inputs: Inputs by name.
        shape: The shape (B, n) of the ids.
    """
    plain = (bool, int, float, str, type(None), Tensor)
    if any(not isinstance(value, plain) for value in inputs.values()):
        return None
    tensors = [value for value in inputs.values() if isinstance(value, Tensor)]
    return int(shape[1]) if all(value.shape[:2] == tuple(shape) for value in tensors) else None


def fewer_tokens(calls: Sequence[AttentionCall], config: Any, length: int) -> int | None:
    """Return a smaller number of tokens with which the model does the same as with all of them, or None.

    Args:
        calls: The attentions of a run with all tokens.
        config: The model's config, or None. Fields that count tokens (windows, chunks, lengths) restrict the number.
        length: Number of tokens of that run.

    Returns:
        The first of `LENGTHS` that differs from every number and size of heads, if it is at most half of `length`. None
        if there are no attentions, if one sees keys by other than their distance, or if the config tells the lengths
        apart.
    """
    if not calls or not all(in_a_band(call) and not call.blocks for call in calls):
        return None
    fewer = next((n for n in LENGTHS if all(n not in _sizes(call) for call in calls)), None)
    if fewer is None or fewer * _LEAST_GAIN > length or _tells_apart(config, fewer, length):
        return None
    return fewer


def with_first_tokens(inputs: Mapping[str, Any], fewer: int) -> dict[str, Any]:
    """Return the inputs cut to their first `fewer` tokens: every tensor to `tensor[:, :fewer]`; other values stay."""
    return {name: value[:, :fewer] if isinstance(value, Tensor) else value for name, value in inputs.items()}


def first_inputs(loaded: LoadedModel, calls: Sequence[AttentionCall]) -> tuple[Inputs, int, int] | None:
    """Return shorter inputs with which the model does the same, or None if the inputs can't be cut.

    Args:
        loaded: The model with its inputs.
        calls: The attentions of a run with these inputs.

    Returns:
        The cut inputs, their number of tokens, and the number before. None if the user gave the inputs, if they have no
        ids (B, n) or a tensor without a row for each token, or if `fewer_tokens` finds no number.
    """
    inputs = loaded.inputs
    if not loaded.made or not isinstance(inputs, dict):
        return None
    ids = next((x for name, x in inputs.items() if _IDS.search(name) and isinstance(x, Tensor) and x.dim() == 2), None)
    length = None if ids is None else tokens_of_each(inputs, ids.shape)
    fewer = None if length is None else fewer_tokens(calls, loaded.config, length)
    return None if length is None or fewer is None else (with_first_tokens(inputs, fewer), fewer, length)


def same_keys(one: AttentionCall, other: AttentionCall, length: int, fewer: int) -> bool:
    """Return whether an attention with fewer tokens sees the same keys, per query, as with all tokens.

    Args:
        one: The call of the run with all tokens.
        other: The same call of the run with the first tokens.
        length: Number of tokens of the first run.
        fewer: Number of tokens of the second run.
    """
    of_one, of_other = (one.query_len, one.key_len), (other.query_len, other.key_len)
    return _shrinks(of_one, of_other, length, fewer) and _same_sight(one.mask, other.mask, length, fewer)


def _sizes(call: AttentionCall) -> tuple[int | None, ...]:
    return call.heads, call.kv_heads, call.head_dim, call.padded_head_dim, call.value_dim, call.model_dim


def _tells_apart(config: Any, fewer: int, length: int) -> bool:
    """Return whether a config has a number of tokens that is reached by the one length only."""
    return any(
        _CAPACITY in name or (fewer <= number < length and _COUNTS_TOKENS.search(name))
        for name, number in _numbers(config)
    )


def _numbers(config: Any, depth: int = 0) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a config and of the configs in it, with the names of their fields."""
    fields = config if isinstance(config, Mapping) else own_fields(config)
    for name, value in fields.items():
        for entry in value if isinstance(value, list | tuple) else [value]:
            if isinstance(entry, Mapping) or hasattr(entry, "model_type"):
                yield from _numbers(entry, depth + 1) if depth < _DEEPEST_CONFIG else ()
            elif isinstance(entry, int | float) and not isinstance(entry, bool):
                yield str(name), float(entry)


def _shrinks(one: tuple[int, ...], other: tuple[int, ...], length: int, fewer: int) -> bool:
    """Return whether numbers of tokens are those of the fewer ones, and any other number is the same."""
    return tuple(fewer if size == length else size for size in one) == other


def _same_sight(one: Mask | None, other: Mask | None, length: int, fewer: int) -> bool:
    if one is None or other is None:
        return one is other
    if (one.kind, one.band) != (other.kind, other.band):
        return False
    # The last row sees the first key, n - 1 tokens before it; and so on the other side.
    ends = {length - 1: fewer - 1, 1 - length: 1 - fewer}
    return all(
        a is not None and ends.get(a, a) == b for a, b in ((one.least, other.least), (one.greatest, other.greatest))
    )

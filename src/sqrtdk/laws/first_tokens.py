"""Inputs cut to their first tokens, of which laws are asked at a fraction of the cost.

What a law compares does not depend on the number of tokens as long as the model does the same with fewer. No law is
broken by the first tokens: one that looks broken, or that can't be asked for a reason that may lie in their number, is
asked of the whole inputs. The inputs are cut only if

- they were made for the model: what a user gives may show its fault at the end, and has documents and padding;
- every tensor has a row for each token, so that no image or audio loses its place;
- no number of the config by which tokens are counted (`sliding_window`, `chunk_size`,
  `original_max_position_embeddings`) lies between the two lengths, and no expert has a capacity;
- every attention was read, the same ones run in the same steps, and every row sees the same keys: all of them, all
  before it, or those in a window that is reached by the first tokens as well.

The traced run that shows the last is the one that other laws share. If `causal` is kept by the first tokens, one cut of
the whole inputs, with another seed, has to move no earlier position as well; if `cache` is, steps behind a cache of all
tokens but the last have to give what one pass gives. Otherwise the first tokens stand for nothing. Not seen: a number
in the code from which on padding, samples, positions or training are treated in another way.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from sqrtdk.audit.configs import own_fields
from sqrtdk.audit.records import KEPT, NOT_ASKED, JudgedCall, LawAnswer
from sqrtdk.laws.inputs import contents
from sqrtdk.laws.padded import in_a_band
from sqrtdk.laws.subject import NotAsked, Subject
from sqrtdk.laws.traced import traced
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


def first_tokens(subject: Subject) -> Subject | None:
    """Return the model with the first tokens of its inputs, or None if they may not stand for all of them."""
    length = _length(subject)
    calls = [judged.call for judged in subject.calls]
    if length is None or not calls or not all(_plain(call) for call in calls):
        return None
    fewer = next((n for n in LENGTHS if all(n not in _sizes(call) for call in calls)), None)
    if fewer is None or fewer * _LEAST_GAIN > length or _tells_apart(subject.config, fewer, length):
        return None
    cut = {name: value[:, :fewer] if isinstance(value, Tensor) else value for name, value in subject.inputs.items()}
    short = subject.over(cut)
    short.calls = subject.calls
    try:
        run = traced(short)
    except NotAsked:
        return None
    if len(run.calls) != len(calls):
        return None
    found: list[JudgedCall] = []
    for judged in subject.calls:
        tensors = run.calls.get(judged.key)
        call = None if tensors is None else tensors.call
        if call is None or not _alike(judged.call, call, length, fewer):
            return None
        shorter = dataclasses.replace(judged.call, query_len=call.query_len, key_len=call.key_len, mask=call.mask)
        found.append(dataclasses.replace(judged, call=shorter))
    short.calls = tuple(found)
    return short


def stand_for_all(answers: list[LawAnswer]) -> bool:
    """Return whether what was answered of the first tokens holds of the whole inputs."""
    return all(answer.state == KEPT or (answer.state == NOT_ASKED and not answer.by_length) for answer in answers)


def _length(subject: Subject) -> int | None:
    """Return the number of tokens, or None if some input is no tensor with a row for each of them."""
    tokens = [content for content in contents(subject) if content.ids]
    plain = (bool, int, float, str, type(None), Tensor)
    if not tokens or any(not isinstance(value, plain) for value in subject.inputs.values()):
        return None
    shape = tokens[0].tensor.shape
    return int(shape[1]) if all(value.shape[:2] == shape for value in subject.tensors.values()) else None


def _plain(call: AttentionCall) -> bool:
    """Return whether rows are positions, and what each row sees is known and has no holes."""
    return in_a_band(call) and not call.blocks


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


def _alike(one: AttentionCall, other: AttentionCall, length: int, fewer: int) -> bool:
    """Return whether an attention does with fewer tokens what it does with all."""
    same = ("module_class", "heads", "kv_heads", "head_dim", "score", "self_attention", "rope", "norm", "bias", "sinks")
    if any(getattr(one, name) != getattr(other, name) for name in same):
        return False
    if _steps(one) != _steps(other):
        return False
    of_one, of_other = (one.query_len, one.key_len), (other.query_len, other.key_len)
    return _shrinks(of_one, of_other, length, fewer) and _same_sight(one.mask, other.mask, length, fewer)


def _steps(call: AttentionCall) -> list[tuple[str, str]]:
    """Return the steps on the way; eager repeats grouped keys, and sdpa does not."""
    return [(stage.where, stage.name) for stage in call.stages if stage.name != "repeat"]


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

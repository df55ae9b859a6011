"""Runs a model in steps with a cache: finds the argument that is the cache, and makes the inputs of each step.

A cache is an argument that forward also returns filled (`past_key_values`, `cache_params`, a tuple of keys and values),
or an object among the inputs that forward fills. A step gets its own tokens, masks of all tokens so far, its own
positions, and every other input unchanged.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sqrtdk.errors import INTERRUPTS
from sqrtdk.laws.inputs import MASK_WORDS, Content, contents, goes_with
from sqrtdk.laws.subject import NotAsked, Outputs, Subject
from sqrtdk.messages import Message
from sqrtdk.models.modules import forward_arguments
from sqrtdk.modules.structures import tensors_of, walk
from sqrtdk.tracing.trace import trace

# past_key_values, cache_params, mems.
_CACHE_ARGUMENT = re.compile(r"(^|_)(past|caches?|mems?|states?|kv|presents?|buckets)(_|$)")
# Arguments of these words that hold no keys: use_cache, cache_position, past_values.
_NO_CACHE = re.compile(
    r"^(use|return|output|no|update|encoder)_|position|hidden|implementation|length|len$|size|mask|config|dtype|offset|"
    r"past_(values|time|observed|sequence|input)|index|step"
)
_CACHE_SWITCH = re.compile(r"^(use|return)_(kv_?|new_?|key_values?_?)?(caches?|past|kv|presents?|mems?)$")
_POSITION_ARGUMENT = re.compile(r"position|^pos(_ids?)?$")  # position_ids, cache_position, pos
_OFFSET_ARGUMENT = re.compile(r"^((pos(ition)?|seq|start|cache)_)?offset$|^start_pos(ition)?$|^(past|cache)_len(gth)?$")


@dataclass(frozen=True, slots=True, eq=False)
class DecodingStep:
    """One run of the tokens from `first` up to `last` (exclusive), behind the cached tokens before them.

    Attributes:
        first: Number of the first token.
        last: Number of the first token after the step.
        subject: The model with the inputs of the step, and the cache as it was before the step.
        outputs: The outputs of the step.
    """

    first: int
    last: int
    subject: Subject
    outputs: Outputs


def cache_arguments(subject: Subject) -> list[str]:
    """Return the names of arguments of forward, and of given inputs, that look like a cache: `past_key_values`, ..."""
    names = {**forward_arguments(subject.module), **subject.inputs}
    return [name for name in names if _CACHE_ARGUMENT.search(name) and not _NO_CACHE.search(name)]


def offset_argument(subject: Subject) -> str | None:
    """Return the argument for the number of cached tokens (`offset`, `start_pos`), or None if forward has none."""
    takes = forward_arguments(subject.module)
    return next((name for name in takes if _OFFSET_ARGUMENT.search(name) and name not in subject.inputs), None)


def switches(subject: Subject) -> dict[str, bool]:
    """Return the arguments of forward that ask for a cache, such as `use_cache`, each with the value True."""
    return {name: True for name in forward_arguments(subject.module) if _CACHE_SWITCH.search(name)}


def decoded(
    subject: Subject, content: Content, ends: tuple[int, ...], caches: Mapping[str, Any], *, whole: bool = False,
    offset: str | None = None, first: int = 0,
) -> Iterator[DecodingStep]:  # fmt: skip
    """Run the tokens in chunks, each with a cache of the tokens before it.

    Args:
        subject: The model with the inputs of one pass, all by name.
        content: The tokens.
        ends: The end of each chunk, exclusive.
        caches: The caches for the first chunk, by argument; they hold the tokens before `first`.
        whole: Also give each chunk the tokens before it, for a forward that cuts them off: `x = x[:, -1:]`.
        offset: The argument that gets the number of the first token of a chunk.
        first: The first token of the first chunk.

    Raises:
        NotAsked: The model raises on a chunk, or returns no cache.
    """
    arguments = cache_arguments(subject)
    held = dict(caches)
    for last in ends:
        inputs = {**switches(subject), **_inputs(subject, content, 0 if whole else first, last), **held}
        step = subject.over(inputs if offset is None else {**inputs, offset: first})
        # Forward may fill a cache in place, and `step` keeps it as it was before.
        given = {name: _copy(value) for name, value in held.items()}
        returned = step.returned(given, shared=tuple(given))
        yield DecodingStep(first, last, step, tensors_of(returned))
        filled = filled_caches(arguments, returned)
        objects = {name: value for name, value in given.items() if _is_object(value)}
        if not filled and not objects and last != ends[-1]:
            raise NotAsked(Message("laws.cache.returns_none"))
        first, held = last, filled or objects


def cut_short(cache: Any, length: int, tokens: int) -> Any:
    """Return a copy of a `DynamicCache` of transformers with its first tokens alone, or None for any other cache.

    Args:
        cache: The cache.
        length: The number of tokens that it has to hold.
        tokens: The number of tokens to keep.
    """
    library = sys.modules.get("transformers.cache_utils")
    whole, plain = getattr(library, "DynamicCache", None), getattr(library, "DynamicLayer", None)
    if whole is None or type(cache) is not whole:
        return None
    copied = _copy(cache)
    if plain is None:  # before 4.56 it holds lists of tensors
        fit = all(x.dim() == 4 and x.shape[2] == length for x in (*copied.key_cache, *copied.value_cache))
        copied.crop(tokens)
        return copied if fit and copied.key_cache else None
    for layer in copied.layers:
        # A layer of another class may keep a window, a state, or an index of its keys.
        both = [layer.keys, layer.values] if type(layer) is plain else []
        if not both or any(not isinstance(x, Tensor) or x.dim() != 4 or x.shape[2] != length for x in both):
            return None
        layer.keys, layer.values = (x[:, :, :tokens] for x in both)
    return copied if copied.layers else None


def filled_caches(arguments: list[str], returned: Any) -> dict[str, Any]:
    """Return what forward returned and takes again as a cache, by argument.

    In a mapping or dataclass it is the field with the argument's name, or the only field named like a cache. In a
    tuple it is the structure of tensors after the output, or the tensors after it if there is one for each argument.

    Example:
        >>> import torch
        >>> y, k = torch.ones(2, 5, 8), torch.ones(2, 4, 5, 2)
        >>> list(filled_caches(["past"], (y, (k, k)))), list(filled_caches(["past_k", "past_v"], (y, k, k)))
        (['past'], ['past_k', 'past_v'])
        >>> filled_caches(["past"], y)
        {}
    """
    fields = _fields(returned)
    if fields is not None:
        filled = {name: fields[name] for name in arguments if _holds(fields.get(name))}
        others = [
            x for name, x in fields.items() if _CACHE_ARGUMENT.search(name) and not _NO_CACHE.search(name) and _holds(x)
        ]
        if filled or not arguments or len(others) != 1:
            return filled
        return {arguments[0]: others[0]}
    if not isinstance(returned, tuple | list) or len(returned) < 2 or not arguments:
        return {}
    # (output, cache): one structure of tensors behind the output.
    structures = [x for x in returned[1:] if not isinstance(x, Tensor) and _holds(x)]
    if len(structures) == 1:
        whole = structures[0]
        if len(arguments) > 1 and isinstance(whole, tuple | list) and len(whole) == len(arguments):
            return dict(zip(arguments, whole, strict=True))
        return {arguments[0]: whole}
    # (output, k, v): a tensor for each argument behind the output.
    tensors = [x for x in returned[1:] if isinstance(x, Tensor) and x.dim() > 2]
    return dict(zip(arguments, tensors, strict=True)) if not structures and len(tensors) == len(arguments) else {}


def _fields(returned: Any) -> dict[str, Any] | None:
    if isinstance(returned, Mapping):
        return {str(name): value for name, value in returned.items()}
    # A namedtuple or a dataclass.
    names = getattr(returned, "_fields", None) or getattr(returned, "__dataclass_fields__", None)
    return None if names is None else {name: getattr(returned, name, None) for name in names}


def _holds(value: Any) -> bool:
    """Return whether the value is or holds a tensor with elements, unlike a list of ids or a memory of length 0."""
    return value is not None and any(x.numel() for _, x in walk(value))


def _is_object(value: Any) -> bool:
    return value is not None and not isinstance(value, Tensor | tuple | str | int | float)


def _copy(value: Any) -> Any:
    try:
        return value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
    except INTERRUPTS:
        raise
    except BaseException as error:  # a user's __deepcopy__ may raise anything
        raise NotAsked(Message("laws.cache.not_copied", type=type(value).__name__)) from error


def _inputs(subject: Subject, content: Content, first: int, last: int) -> dict[str, Any]:
    """Return the inputs of one chunk, without caches."""
    assert content.length is not None
    inputs: dict[str, Any] = {}
    pixels = {other.name for other in contents(subject) if other.length is None}
    caches = cache_arguments(subject)
    for name, value in subject.inputs.items():
        # Images are read once, with the first tokens.
        if name in caches or (first and name in pixels and goes_with(name, content)):
            continue
        inputs[name] = _cut(name, value, content, first, last) if goes_with(name, content) else value
    return inputs


def _cut(name: str, value: Any, content: Content, first: int, last: int) -> Any:
    """Cut an input to a chunk: a mask keeps all columns up to the last token, other (B, n) inputs only the chunk's."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    batch, length = content.tensor.shape[:2]
    if _POSITION_ARGUMENT.search(name):
        return value[..., first:last] if value.shape[-1] == length else value
    # attention_mask (B, n) has a column for every key, cached ones included; input_ids only those of the step
    if MASK_WORDS.search(name):
        if value.dim() == 2 and value.shape[0] == batch and value.shape[1] >= length:
            return value[:, : value.shape[1] - length + last]  # columns of a given cache come first
        if value.shape[-2:] == (length, length):
            return value[..., first:last, :last]
        return value
    return value[:, first:last] if value.shape[:2] == (batch, length) else value


def misaligned(step: Subject, rows: int, cached: int) -> tuple[str, Message] | None:
    """Run a decoding step under a trace, and return its first attention that does not see the cached keys, or None.

    Args:
        step: The model with the inputs of the step, cache included.
        rows: Number of tokens of the step.
        cached: Number of tokens in the cache, for the message.

    Returns:
        The module path of the attention, and a message: the attention has no more keys than queries, so the cache is
        not used, or its causal mask is aligned to the first key, although cached keys come before the queries.
    """
    with trace(step.module, stats=False, numeric=False) as traced:
        step.run({})
    for call in traced.calls:
        mask, keys = call.mask, call.key_len
        if call.self_attention is False or call.axis != "positions" or call.query_len != rows:
            continue
        if keys == rows:
            return call.site, Message("laws.cache.sees_no_cached", count=rows, keys=keys, cached=cached)
        if mask is not None and rows < keys and mask.is_band(0, rows - 1):
            if mask.form == "implicit":
                return call.site, Message("laws.cache.is_causal_upper_left", count=rows, keys=keys)
            return call.site, Message("laws.cache.mask_upper_left", count=rows, keys=keys)
    return None

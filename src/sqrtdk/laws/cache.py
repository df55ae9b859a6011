"""Law `cache`: running a prefill and decoding steps gives the outputs of one pass.

Changed: the tokens (the decoder's, if there are two kinds) run in three steps with a cache: all but three, then one,
then a chunk of two. A transformers model that says it is stateful takes no chunk behind a state, and runs the last two
one by one. Compared: the outputs at the last three positions with those of one pass. The law is asked of these caches:

- "dynamic": the cache that the model makes itself;
- "static": a StaticCache of transformers with more slots than tokens, whose empty slots must not be seen;
- "left padding": a sample that begins with padding, which the prefill hides;
- "given keys", for a module that takes keys and values as tensors but does not return them: it is given the keys of one
  pass, as a trace saw them;
- "empty slots", for a module that writes keys into a larger tensor: rows must not see slots that were never written.

Forwards differ in what they expect in a step: its own tokens, with or without their positions or the number of tokens
before (`offset`), or all tokens so far, of which forward keeps the last. The law holds if one of these works. A broken
law is a `fail`; it is a `warn` for given keys if no mask is at fault, and for empty slots, which may be meant.
Not asked: if the prefill alone gives other outputs, because later tokens then move earlier outputs; if forward takes or
returns no cache; if there are `lengths`, which may or may not count cached tokens.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sqrtdk.audit.configs import field
from sqrtdk.audit.first_tokens import in_a_band
from sqrtdk.audit.records import BROKEN, KEPT, LawAnswer
from sqrtdk.laws.answers import law_broken, law_holds, law_refused
from sqrtdk.laws.causal import tokens_of_decoder
from sqrtdk.laws.decoding import (
    DecodingStep,
    cache_arguments,
    cut_short,
    decoded,
    filled_caches,
    misaligned,
    offset_argument,
    switches,
)
from sqrtdk.laws.first_place import Protected, first_unlike
from sqrtdk.laws.given_keys import empty_slots, given_keys
from sqrtdk.laws.inputs import Content, lengths, other_content
from sqrtdk.laws.moved import moved_positions, position_axes, position_axis
from sqrtdk.laws.padded import mask_name, pad_both_sides, self_attentions, with_positions
from sqrtdk.laws.subject import NotAsked, Outputs, Subject
from sqrtdk.messages import Message, joined
from sqrtdk.models.modules import forward_arguments
from sqrtdk.modules.structures import walk

LAW = "cache"
# Kinds of caches, each named by the end of an id.
_DYNAMIC, _STATIC, _LEFT_PADDING = _CACHE_KINDS = "dynamic", "static", "left_padding"
_STEP_TOKENS = (1, 2)  # tokens of each step after the prefill
_SPARE_SLOTS = 7  # slots of a static cache beyond the number of tokens
_LEAST_CACHED_TOKENS = 6  # tokens needed: three for the prefill, three for the steps


def ask(subject: Subject) -> Iterator[LawAnswer]:
    """Yield for each form of cache whether decoding step by step gives the outputs of one pass.

    Where keys have empty slots, the first answer says whether these are hidden.

    Raises:
        NotAsked: The model takes no cache that could be tried, and has no slots.
    """
    slots = empty_slots(subject)
    if slots is not None:
        yield slots
    try:
        yield from _of_steps(subject.by_name())
    except NotAsked:
        # An answer on slots stands, even if no steps can be run.
        if slots is None:
            raise


def _of_steps(named: Subject) -> Iterator[LawAnswer]:
    if not cache_arguments(named):
        raise NotAsked(Message("laws.cache.no_argument"))
    content = tokens_of_decoder(named)
    length = int(content.tensor.shape[1])
    if next(lengths(named), None) is not None:
        raise NotAsked(Message("laws.cache.lengths"))
    own = filled_caches(cache_arguments(named), named.base_returned)
    if not own:  # it returns a cache only where it is asked for one
        own = filled_caches(cache_arguments(named), named.returned(switches(named)))
    # It returns no cache, and has no cache object among its inputs that it could fill.
    if not own and not any(not isinstance(value, Tensor | tuple) for value in _given_caches(named).values()):
        if not _given_caches(named):
            raise NotAsked(Message("laws.cache.returns_none"))
        yield from given_keys(named, content)
        return
    if length < _LEAST_CACHED_TOKENS:
        raise NotAsked(Message("laws.cache.few_tokens", count=length, least=_LEAST_CACHED_TOKENS), by_length=True)
    for kind in _CACHE_KINDS:
        try:
            yield _answer_for_kind(named, content, kind, own)
        except NotAsked as error:
            yield law_refused(LAW, _about(kind), error)


def steps_stay(subject: Subject) -> bool:
    """Return whether decoding in steps with a cache gives the outputs of one pass.

    Only a cache that the model makes itself, or that was given in the inputs, is tried. A decoder behind an encoder is
    not tried and counts as True, because each step would run the encoder again.

    Raises:
        NotAsked: The steps can't be run.
    """
    named = subject.by_name()
    content = tokens_of_decoder(named)
    # If no later token moves an earlier output, the cache of the audit's run begins with that of a shorter one.
    if content.name.startswith("decoder") or (
        subject.earlier_stay and _steps_stay_behind(named, content, subject.returned_before)
    ):
        return True
    return _compared(named, content, _given_caches(named), _DYNAMIC).state == KEPT


def _steps_stay_behind(subject: Subject, content: Content, returned: Any) -> bool:
    """Return whether steps give what one pass gives, behind the cache of that pass with its first tokens alone.

    False if they do not, or if the pass returned no cache that can be cut.
    """
    batch, length = content.tensor.shape[:2]
    first = length - sum(_STEP_TOKENS)
    found = filled_caches(cache_arguments(subject), returned)
    caches = {name: cut_short(cache, length, first) for name, cache in found.items()}
    if not caches or any(cache is None for cache in caches.values()) or _given_caches(subject):
        return False
    try:
        steps = list(decoded(subject, content, (first + 1, length), caches, first=first))
    except NotAsked:
        return False
    rows = [_unlike(subject.base, step, batch, length) for step in steps]
    return all(row is not None and not bool(row.any()) for row in rows)


def _about(kind: str) -> Message:
    return Message(f"laws.cache.about.{kind}")


def _answer_for_kind(subject: Subject, content: Content, kind: str, own: dict[str, Any]) -> LawAnswer:
    whole, tokens = subject, content
    if kind == _LEFT_PADDING:
        if mask_name(subject, content) is None:
            raise NotAsked(Message("laws.asking.no_attention_mask"))
        whole = pad_both_sides(subject, content, last_sample=True).left
        tokens = Content(content.name, whole.inputs[content.name])
    caches = _given_caches(subject)
    if kind == _STATIC:
        if caches:
            raise NotAsked(Message("laws.cache.own_cache"))
        caches = _static(subject, tokens, own)
    answer = _compared(whole, tokens, caches, kind)
    # Forwards differ in what a step takes: each form is tried, and one that works is enough.
    if answer.state == BROKEN and kind == _DYNAMIC and _takes_the_whole(subject, tokens, caches):
        return law_holds(LAW, _about(kind), Message("laws.cache.takes_the_whole"))
    if answer.state == BROKEN and (offset := offset_argument(subject)) is not None:
        answer = _compared(whole, tokens, caches, kind, offset)
    if answer.state == BROKEN and kind != _LEFT_PADDING and _can_take_positions(subject):
        again = _compared(with_positions(whole, tokens), tokens, caches, kind)
        if again.state != BROKEN:
            return law_holds(LAW, _about(kind), Message("laws.cache.with_position_ids"))
    if answer.state == BROKEN and kind == _STATIC and not all(map(in_a_band, self_attentions(subject, content))):
        raise NotAsked(Message("laws.cache.data_picks_keys"), by_length=True)
    return answer


def _takes_the_whole(subject: Subject, content: Content, caches: dict[str, Any]) -> bool:
    """Return whether steps that also get the tokens before them return one row, equal to that of one pass."""
    batch, length = content.tensor.shape[:2]
    ends = tuple(range(length - sum(_STEP_TOKENS), length + 1))
    try:
        rows = [
            _unlike(subject.base, step, batch, length)
            for step in decoded(subject, content, ends, caches, whole=True)
            if step.first
        ]
    except NotAsked:
        return False
    return all(row is not None and not bool(row.any()) for row in rows)


def _can_take_positions(subject: Subject) -> bool:
    takes = "position_ids" in forward_arguments(subject.module)
    return takes and "position_ids" not in subject.inputs and not _given_caches(subject)


def _given_caches(subject: Subject) -> dict[str, Any]:
    return {name: value for name in cache_arguments(subject) if (value := subject.inputs.get(name)) is not None}


def _static(subject: Subject, content: Content, own: dict[str, Any]) -> dict[str, Any]:
    """Return a StaticCache of transformers for a model whose own cache is of a transformers class.

    Raises:
        NotAsked: transformers is not loaded, or the model has no such cache.
    """
    library = sys.modules.get("transformers.cache_utils")
    base = getattr(library, "Cache", None)
    name = next((name for name, cache in own.items() if base is not None and isinstance(cache, base)), None)
    if library is None or name is None:
        raise NotAsked(Message("laws.cache.not_of_transformers"))
    if field(subject.module, "_can_compile_fullgraph") is False:
        raise NotAsked(Message("laws.cache.no_static"))
    try:
        config = subject.config.get_text_config(decoder=True)
        takes = inspect.signature(library.StaticCache).parameters
        like = next(x for _, x in walk(own[name]))
        known: dict[str, Any] = {"max_batch_size": content.tensor.shape[0], "dtype": like.dtype, "device": like.device}
        known = {option: value for option, value in known.items() if option in takes}  # until 4.56, when it is made
        cache = library.StaticCache(config=config, max_cache_len=content.tensor.shape[1] + _SPARE_SLOTS, **known)
        if isinstance(own[name], library.EncoderDecoderCache):
            # The encoder's keys are all written at once: no slots, and no window (T5Gemma's is the decoder's alone).
            cache = library.EncoderDecoderCache(cache, library.DynamicCache())
    except (AttributeError, TypeError, ValueError) as error:
        raise NotAsked(Message("laws.cache.static_failed", error=str(error)), by_length=True) from error
    return {name: cache}


def _compared(
    subject: Subject, content: Content, caches: dict[str, Any], kind: str, offset: str | None = None
) -> LawAnswer:
    """Compare one pass with a prefill and two cached steps.

    Args:
        subject: the model, with the inputs of the one pass.
        content: its tokens.
        caches: the caches to fill, by the names of forward's arguments; empty if the model makes its own.
        kind: kind of cache that the answer names.
        offset: argument of forward that takes the number of tokens before a step; None if it has none.
    """
    batch, length = content.tensor.shape[:2]
    prefill = length - sum(_STEP_TOKENS)
    ends = [prefill, prefill + 1, length]
    # A recurrent state (Mamba, RecurrentGemma) takes one token at a time after the prefill.
    if field(subject.module, "_is_stateful") is True:
        ends.insert(2, prefill + 2)
    base, steps = subject.base, list(decoded(subject, content, tuple(ends), caches, offset=offset))
    rows = [_unlike(base, step, batch, length) for step in steps]
    if all(row is None for row in rows[1:]):
        raise NotAsked(Message("laws.asking.no_output_per_token"), by_length=True)
    # In a static cache, a prefill that differs may see empty slots, which is a fault.
    if rows[0] is not None and bool(_without_padding(subject, content, rows[0]).any()) and kind != _STATIC:
        later = _later_tokens_move(subject, content, prefill)
        raise NotAsked(Message("laws.cache.later_tokens_move" if later else "laws.cache.length_moves"), by_length=True)
    moved = [None if row is None else _without_padding(subject, content, row) for row in rows]
    faulty = [step for step, row in zip(steps, moved, strict=True) if row is not None and bool(row.any())]
    if not faulty:
        return law_holds(LAW, _about(kind))
    marks = torch.zeros(batch, length, dtype=torch.bool)
    for step, row in zip(steps, moved, strict=True):
        if row is not None:
            marks[:, step.first : step.last] |= row.cpu()
    return _broken(subject, content, faulty, marks, kind)


def _later_tokens_move(subject: Subject, content: Content, first: int) -> bool:
    """Return whether tokens from a position on move outputs before it, and not their number alone."""
    batch, length = content.tensor.shape[:2]
    later = (torch.arange(length) >= first).expand(batch, length)
    after = subject.run({content.name: other_content(subject, content, later)})
    axes = position_axes(subject.base, batch, length).items()
    rows = (moved_positions(subject.base[name], after[name], axis).cpu() for name, axis in axes if name in after)
    return any(bool(_without_padding(subject, content, moved)[:, :first].any()) for moved in rows)


def _unlike(base: Outputs, step: DecodingStep, batch: int, length: int) -> Tensor | None:
    """Return which positions of a step differ from one pass, (B, m), or None if no output has these positions."""
    found: Tensor | None = None
    for name, one in base.items():
        axis = position_axis(one, batch, length)
        if axis is None or name not in step.outputs:
            continue
        part, other = one.narrow(axis, step.first, step.last - step.first), step.outputs[name]
        if part.shape == other.shape:
            rows = moved_positions(part, other, axis).cpu()
            found = rows if found is None else found | rows
    return found


def _without_padding(subject: Subject, content: Content, rows: Tensor) -> Tensor:
    """Return the rows without those of padding, whose outputs do not matter."""
    name = mask_name(subject, content)
    mask = None if name is None else subject.inputs.get(name)
    if isinstance(mask, Tensor) and mask.shape == content.tensor.shape[:2] and rows.shape[1] > max(_STEP_TOKENS):
        return rows & mask[:, : rows.shape[1]].bool().cpu()
    return rows


def _broken(subject: Subject, content: Content, faulty: list[DecodingStep], marks: Tensor, kind: str) -> LawAnswer:
    step, batch = faulty[0], marks.shape[0]
    protected = torch.zeros_like(marks)
    protected[:, step.first : step.last] = True
    own = torch.ones(batch, step.last - step.first, dtype=torch.bool)  # a step's inputs hold its own tokens alone
    site = first_unlike(
        (subject, Protected(protected, rest="nothing")),
        (step.subject, Protected(own, rest="nothing")),
        decoder=content.name.startswith("decoder"),
    )
    count, worst = int(marks.any(0).sum()), marks[int(marks.sum(1).argmax())]
    sentences = [_differs(step)]
    if kind == _STATIC:
        sentences.append(Message("laws.cache.of_static"))
    elif kind == _LEFT_PADDING:
        sentences.append(Message("laws.cache.of_left_padding"))
    for behind in faulty:
        if behind.first and (seen := misaligned(behind.subject, behind.last - behind.first, behind.first)) is not None:
            sentences.append(seen[1])
            site = site or seen[0]
            break
    message, source = joined(sentences), Message("laws.cache.source")
    fix = Message("laws.cache.fix_static" if kind == _STATIC else "laws.cache.fix")
    return law_broken(LAW, _about(kind), "fail", site, message, fix, source, value=float(count), positions=worst)


def _differs(step: DecodingStep) -> Message:
    tokens = step.last - step.first
    if step.first == 0:
        return Message("laws.cache.prefill_differs", tokens=tokens)
    if tokens > 1:
        return Message("laws.cache.chunk_differs", tokens=tokens, first=step.first)
    return Message("laws.cache.step_differs", first=step.first)

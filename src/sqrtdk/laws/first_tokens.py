"""Inputs cut to their first tokens, of which laws are asked at a fraction of the cost.

No law is broken by the first tokens: one that looks broken, or that can't be asked for a reason that may lie in their
number, is asked of the whole inputs. `sqrtdk.audit.first_tokens` says when inputs are cut; here the attentions also
have to run in the same steps.

The traced run that shows this is the one that other laws share. If `causal` is kept by the first tokens, one cut of
the whole inputs, with another seed, has to move no earlier position as well; if `cache` is, steps behind a cache of all
tokens but the last have to give what one pass gives. Otherwise the first tokens stand for nothing. Not seen: a number
in the code from which on padding, samples, positions or training are treated in another way.
"""

from __future__ import annotations

import dataclasses

from sqrtdk.audit.first_tokens import fewer_tokens, same_keys, tokens_of_each, with_first_tokens
from sqrtdk.audit.records import KEPT, NOT_ASKED, JudgedCall, LawAnswer
from sqrtdk.laws.inputs import contents
from sqrtdk.laws.subject import NotAsked, Subject
from sqrtdk.laws.traced import traced
from sqrtdk.tracing.records import AttentionCall


def first_tokens(subject: Subject) -> Subject | None:
    """Return the model with its inputs cut to the first tokens, to make runs cheap, or None if they can't be cut.

    The cut inputs are run once under a trace. The result is None if their number of tokens can't be reduced (see
    `sqrtdk.audit.first_tokens.fewer_tokens`), if this run fails, or if an attention in it does not see the same keys.
    """
    length = _length(subject)
    calls = [judged.call for judged in subject.calls]
    fewer = None if length is None else fewer_tokens(calls, subject.config, length)
    if length is None or fewer is None:
        return None
    short = subject.over(with_first_tokens(subject.inputs, fewer))
    short.calls = subject.calls
    try:
        run = traced(short, seed=short.seed + 1)  # beside the plain run, it shows whether two runs agree
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
    """Return whether answers for the first tokens also hold for the whole inputs.

    They do if each is "kept", or "not asked" for a reason that does not lie in the number of tokens.
    """
    return all(answer.state == KEPT or (answer.state == NOT_ASKED and not answer.by_length) for answer in answers)


def _length(subject: Subject) -> int | None:
    """Return the number of tokens, or None if some input is no tensor with a row for each of them."""
    tokens = [content for content in contents(subject) if content.ids]
    return tokens_of_each(subject.inputs, tokens[0].tensor.shape[:2]) if tokens else None


def _alike(one: AttentionCall, other: AttentionCall, length: int, fewer: int) -> bool:
    """Return whether an attention does with fewer tokens what it does with all."""
    same = ("module_class", "heads", "kv_heads", "head_dim", "score", "self_attention", "rope", "norm", "bias", "sinks")
    if any(getattr(one, name) != getattr(other, name) for name in same):
        return False
    return _steps(one) == _steps(other) and same_keys(one, other, length, fewer)


def _steps(call: AttentionCall) -> list[tuple[str, str]]:
    """Return the steps on the way; eager repeats grouped keys, and sdpa does not."""
    return [(stage.where, stage.name) for stage in call.stages if stage.name != "repeat"]

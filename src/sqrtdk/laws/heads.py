"""Law `heads`: heads that change places in the projections change places in the attention's output.

Changed: the rows of the weights that project q, k and v. Each group of query heads takes the place of the group before
it, with its head of keys and values, and the heads of the first group move on by one (`head_order`). Compared: the
output of each head, weights . v, with that of the head that it was before.
Broken: `k.repeat(1, n, 1, 1)` for `k.repeat_interleave(n, 1)`, which gives a head the keys of another group; k and v
that are repeated in two orders; a mask or a bias of (batch * heads) that is laid out in another order than q. The last
two are told from heads that differ on purpose (ALiBi, T5, sinks, a window for each head) by a run of equal samples: of
equal samples, a head has one mask and one bias.
What it changes is put back where its module ends, so that all attentions share one traced run. The weights are
exchanged as objects for that run; the user's own are not written to.
Not asked: a single head; q, k or v that is not read from a projection, or is changed by a parameter of each head; heads
that differ on purpose.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from sqrtdk.audit.configs import module_at
from sqrtdk.audit.records import KEPT, LawAnswer
from sqrtdk.laws.answers import law_broken, law_holds, law_not_asked
from sqrtdk.laws.head_order import HeadMove, exchanged_parameters, move_heads
from sqrtdk.laws.inputs import mask_inputs
from sqrtdk.laws.moved import moved_entries
from sqrtdk.laws.samples import MOST_SAMPLES, batches
from sqrtdk.laws.subject import NotAsked, Subject
from sqrtdk.laws.traced import Leaving, ended_after, exchanged, run_traced, traced, upwards
from sqrtdk.messages import Message, joined
from sqrtdk.modules.structures import restored
from sqrtdk.tracing.tensors import CallTensors

LAW = "heads"
MOST_ATTENTIONS = 8  # attentions that are asked, each of another class or layout
_TOGETHER: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"mask": torch.mul, "bias": torch.add, "scale": torch.mul}
MOST_TRACED_RUNS = 2  # traced runs; a second one is for attentions inside a module that the first has changed


def ask(subject: Subject) -> Iterator[LawAnswer]:
    """Yield a broken answer for each distinct violation, or one answer: are outputs of permuted heads permuted?

    The reason of a kept answer says how many attentions could not be asked, and why. Beside broken answers, or if none
    could be asked, this is an answer "not asked" of its own.

    Raises:
        NotAsked: No attention of the traced run has more than one head over keys that are positions.
    """
    calls = list(traced(subject).calls.values())
    kinds, rest = _kinds(calls)
    if not kinds:
        raise NotAsked(Message("laws.heads.no_heads"))
    answers: dict[str, LawAnswer] = {}  # each message once, at the first attention that has it
    by_length: set[str] = set()  # reasons that may lie in the number of tokens
    moves: list[HeadMove] = []
    kept = asked_of = 0
    for key in kinds:
        try:
            moves.append(move_heads(subject, kinds[key][0]))
        except NotAsked as error:
            rest[error.reason] += len(kinds[key])
            by_length |= {error.reason} if error.by_length else set()
    sizes = {id(alike[0]): len(alike) for alike in kinds.values()}
    asked = [(move, one) for together in _apart(moves) for move, one in _answers(subject, together)]
    for move, answer in asked:
        size = sizes[id(move.call)]
        if answer.finding is not None:
            answers.setdefault(answer.reason, answer)
        elif answer.state == KEPT:
            kept, asked_of = kept + size, asked_of + 1
        else:
            rest[answer.reason] += size
            by_length |= {answer.reason} if answer.by_length else set()
    for move in moves:
        if not any(move is one for one, _ in asked):
            rest[Message("laws.heads.no_run")] += sizes[id(move.call)]
    yield from answers.values()
    parts = [Message("laws.heads.rest", count=count, reason=reason) for reason, count in rest.most_common()]
    if kept and not answers:
        if parts and asked_of < kept:
            parts = [Message("laws.heads.asked_for", asked=asked_of, count=kept), *parts]
        some = Message("laws.heads.some", kept=kept, all=len(calls), rest=joined(parts)) if parts else ""
        yield law_holds(LAW, "", some)
    elif parts:
        reason = joined(parts) if answers else rest.most_common(1)[0][0]
        yield law_not_asked(LAW, "", reason, by_length=reason in by_length)


def _kinds(calls: Sequence[CallTensors]) -> tuple[dict[object, list[CallTensors]], Counter[str]]:
    """Return the attentions by class of module, layout of heads and terms, and why how many others are not asked."""
    kinds: dict[object, list[CallTensors]] = {}
    rest: Counter[str] = Counter()
    for tensors in calls:
        call, shape = tensors.call, tensors.query.values.shape
        if call is None or len(shape) != 4 or call.axis != "positions" or shape[1] == 1:
            rest[Message("laws.heads.one_head")] += 1
            continue
        # T5's attention over the encoder has no bias, as that over the decoder has, in one class.
        terms = tuple(sorted({term.name for term in tensors.terms or ()}))
        shapes = shape[1], shape[3], tensors.key.values.shape[1], call.query_len == call.key_len
        kinds.setdefault((call.module_class, *shapes, terms), []).append(tensors)
    for key in list(kinds)[MOST_ATTENTIONS:]:
        rest[Message("laws.heads.too_many", most=MOST_ATTENTIONS)] += len(kinds.pop(key))
    return kinds, rest


def _apart(moves: list[HeadMove]) -> Iterator[list[HeadMove]]:
    """Yield the moves that fit into one run: none inside a module that another changes, no weight twice."""
    for _ in range(MOST_TRACED_RUNS):
        together: list[HeadMove] = []
        for move in moves:
            nested = any(one.path in upwards(move.path) or move.path in upwards(one.path) for one in together)
            if not nested and not any(one.parameters.keys() & move.parameters.keys() for one in together):
                together.append(move)
        if together:
            yield together
        moves = [move for move in moves if move not in together]


def _answers(subject: Subject, moves: list[HeadMove]) -> Iterator[tuple[HeadMove, LawAnswer]]:
    passages = traced(subject).passages
    parameters = {name: tensor for move in moves for name, tensor in move.parameters.items()}
    with ExitStack() as stack:
        stack.enter_context(exchanged_parameters(subject.module, parameters))
        for move in moves:
            module = module_at(subject.module, move.path)
            if move.path and module is not None and move.path in passages:
                stack.enter_context(exchanged(module, None, _putting_back(passages[move.path].gives)))
        if not any(move.call.index for move in moves):  # a later call of a module may be another call of it
            stack.enter_context(ended_after(subject.module, {move.path for move in moves}))
        again = run_traced(subject, _masks_moved(subject, moves)).calls
    for move in moves:
        after = again.get((move.call.site, move.call.index))
        if after is None or after.output.shape != move.call.output.shape:
            yield move, law_not_asked(LAW, "", Message("laws.heads.lost"))
        else:
            yield move, _judged(subject, move, after)


def _putting_back(gives: Any) -> Leaving:
    return lambda output: restored(output, gives)


def _masks_moved(subject: Subject, moves: list[HeadMove]) -> dict[str, Tensor]:
    """Return the masks that the user gives for each head, (B, H, L, S) or torch's (B * H, L, S), with heads moved."""
    changes: dict[str, Tensor] = {}
    for mask in mask_inputs(subject):
        for move in moves:
            batch, heads = move.call.query.values.shape[:2]
            order = move.query_order.to(mask.tensor.device)
            if mask.tensor.dim() == 4 and mask.tensor.shape[:2] in ((batch, heads), (1, heads)):
                changes.setdefault(mask.name, mask.tensor[:, order])
            elif mask.tensor.dim() == 3 and mask.tensor.shape[0] == batch * heads:
                by_head = mask.tensor.view(batch, heads, *mask.tensor.shape[1:])
                changes.setdefault(mask.name, by_head[:, order].flatten(0, 1))
    return changes


def _judged(subject: Subject, move: HeadMove, after: CallTensors) -> LawAnswer:
    before = move.call
    for vector, again, order in (
        (before.query, after.query, move.query_order),
        (before.key, after.key, move.key_order),
        (before.value, after.value, move.value_order),
    ):
        if not _follows(vector.values, again.values, order):
            return law_not_asked(LAW, "", Message("laws.heads.operands"))
    output, site = before.output, before.site
    if not bool(moved_entries(output, output[:, move.query_order.to(output.device)]).any()):
        return law_not_asked(LAW, "", Message("laws.heads.equal_heads"))
    if _follows(output, after.output, move.query_order):
        return law_holds(LAW)
    # Read only to say why: the output of some head is not that of the head that it was.
    if move.key_heads != move.value_heads:
        values = {"keys": _list(move.key_heads), "values": _list(move.value_heads)}
        message, fix = Message("laws.heads.two_orders", **values), Message("laws.heads.fix_groups")
        return law_broken(LAW, "", "fail", site, message, fix, Message("laws.heads.source_groups"))
    if move.tiled:
        message = Message("laws.heads.tiled", heads=_list(move.key_heads), groups=_list(move.groups))
        fix, source = Message("laws.heads.fix_groups"), Message("laws.heads.source_groups")
        return law_broken(LAW, "", "warn", site, message, fix, source)
    if move.key_heads != move.groups:
        return law_not_asked(LAW, "", Message("laws.heads.other_groups", heads=_list(move.key_heads)))
    return _of_terms(subject, before)


def _follows(before: Tensor, after: Tensor, order: Tensor) -> bool:
    wanted = before[:, order.to(before.device)]
    return wanted.shape == after.shape and not bool(moved_entries(wanted, after).any())


def _list(heads: Sequence[int]) -> str:
    return " ".join(map(str, heads))


# -- masks and biases that differ from head to head --------------------------------------------------------------------


def _of_terms(subject: Subject, call: CallTensors) -> LawAnswer:
    """Return the answer for an attention whose masks or biases may be those of another sample or head."""
    by_purpose = law_not_asked(LAW, "", Message("laws.heads.differ"))
    uneven = [name for name, term in _terms(call) if _differs(term, 1)]
    if not uneven:
        return by_purpose
    try:
        found = batches(subject)
        equal = _equal_samples(subject, found.stays)
        if not found.known or equal is None or call.query.values.shape[0] != _batch(subject):
            return by_purpose
        again = run_traced(equal).calls.get((call.site, call.index))
    except NotAsked:
        return by_purpose
    if again is None:
        return by_purpose
    alike = dict(_terms(again))
    for name in _TOGETHER:
        if name not in alike:
            continue
        # Equal samples, and yet a head has other numbers in each: those of another head.
        if _differs(alike[name], 0):
            return _of_another(call, name, "head")
        term = next((term for own, term in _terms(call) if own == name), None)
        if name == "mask" and term is not None and _differs(term, 1) and not _differs(alike[name], 1):
            # No more masks than samples, and none is left that differs by head where the samples are equal.
            each = term.expand(call.query.values.shape[0], call.query.values.shape[1], *term.shape[2:])
            if len(torch.unique(each.flatten(0, 1).flatten(1), dim=0)) <= len(each):
                return _of_another(call, name, "sample")
    return by_purpose


def _of_another(call: CallTensors, term: str, whose: str) -> LawAnswer:
    message = Message(f"laws.heads.{term}_of_another.{whose}")
    fix, source = Message("laws.heads.fix_terms"), Message("laws.heads.source_terms")
    return law_broken(LAW, "", "fail", call.site, message, fix, source)


def _terms(call: CallTensors) -> list[tuple[str, Tensor]]:
    """Return name and values, (B or 1, H or 1, L or 1, S or 1), of masks, biases and factors, each kind together."""
    found: dict[str, Tensor] = {}
    for term in call.terms or ():
        if term.name in _TOGETHER and isinstance(term.value, Tensor) and term.value.dim() == 4:
            value = term.value
            found[term.name] = _TOGETHER[term.name](found[term.name], value) if term.name in found else value
    return list(found.items())


def _differs(term: Tensor, axis: int) -> bool:
    """Return whether the numbers differ along an axis, by more than rounding."""
    first = term.narrow(axis, 0, 1).expand_as(term)
    if term.dtype is torch.bool:
        return not torch.equal(first, term)
    return bool(moved_entries(first, term).any())


def _batch(subject: Subject) -> int:
    return int(next(iter(subject.tensors.values())).shape[0])


def _equal_samples(subject: Subject, number: int) -> Subject | None:
    """Return the model with one of its samples in the place of all, or None if an input has another first axis."""
    batch = _batch(subject)
    if any(not value.dim() or value.shape[0] != batch for value in subject.tensors.values()):
        return None
    count = MOST_SAMPLES if batch == 1 else batch
    return subject.over(
        subject.inputs
        | {name: value[[min(number, batch - 1)]].repeat_interleave(count, 0) for name, value in subject.tensors.items()}
    )

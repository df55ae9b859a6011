"""Law `place`: a token keeps its place when heads are split and when they are merged.

Split: noise is added to one token at the input of an attention module. Compared: q, k and v of a traced run with and
without the noise. A token belongs into its own row of every head; `x.view(B, H, L, E)` without a transpose puts it into
one head, over several rows. Merge: rows of single heads are changed in the attention's output. Compared: the rows of
the module's output. Row i of every head belongs into row i; `o.reshape(B, L, H * E)` without a transpose spreads it
over the whole length.
The law is only broken by what a view does to the rows, in some order of the axes. A convolution, a shift of tokens, a
window, a hash or a pooling also move other rows, or in another order, and are legitimate. One attention is asked for
each class of module and layout of heads. What it changes is put back where its module ends, so that all of them share
three runs: one traced run for the inputs as they are, one for the split, one for the merge.
Not asked: a single head; keys that are not positions; if no module around the attention takes tokens or gives rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sqrtdk.audit.configs import module_at
from sqrtdk.audit.records import KEPT, LawAnswer
from sqrtdk.laws.answers import law_broken, law_holds, law_not_asked
from sqrtdk.laws.inputs import contents, other_content
from sqrtdk.laws.moved import moved_entries
from sqrtdk.laws.subject import NotAsked, RunEnded, Subject
from sqrtdk.laws.traced import ended_after, exchanged, may_end_early, run_traced, traced, upwards
from sqrtdk.laws.views import merged_by_view, merged_right, split_by_view
from sqrtdk.messages import Message
from sqrtdk.modules.structures import first_tensor, restored
from sqrtdk.tracing.tape.stance import Disturbed, fast_path_off
from sqrtdk.tracing.tensors import CallTensors

LAW = "place"
SPLIT, MERGE = "split", "merge"  # each the end of ids
MOST_ATTENTIONS = 8  # attentions that are asked, each of another class or layout
LEAST_ROWS_MERGED = 4  # with fewer rows a view and a transpose may give the same
CHANGE_SIZE = 3.0  # times the root mean square of the changed tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Entrance:
    """The place where a token is changed: the path of a module, and the token's number there."""

    path: str
    token: int
    tokens: int
    layout: str  # "BND", "NBD", "ND", "BhwC", "BChw"


def ask(subject: Subject) -> Iterator[LawAnswer]:
    """Yield whether each token stays in its own row when channels are split into heads and when heads are merged.

    There is an answer for each distinct violation of the split or of the merge, and one for either without a violation.

    Raises:
        NotAsked: No attention was traced.
    """
    run = traced(subject)
    calls = _distinct(subject, list(run.calls.values()))
    if not calls:
        raise NotAsked(Message("laws.place.no_attention"))
    for part, answers in ((SPLIT, _split(subject, calls)), (MERGE, _merged(subject, calls))):
        told = list(answers)
        found: dict[str, LawAnswer] = {}  # each message once, at the first module that has it
        for answer in told:
            if answer.finding is not None:
                found.setdefault(answer.reason, answer)
        yield from found.values() or sorted(told, key=lambda answer: answer.state != KEPT)[:1]
        if not told:
            yield law_not_asked(LAW, _about(part), Message(f"laws.place.no_module.{part}"))


def _about(part: str) -> Message:
    return Message(f"laws.place.about.{part}")


def _distinct(subject: Subject, calls: list[CallTensors]) -> list[CallTensors]:
    """Return one call of each class of module and layout of heads."""
    found: dict[Any, CallTensors] = {}
    for tensors in calls:
        call = tensors.call
        if call is None or tensors.index or tensors.query.values.dim() != 4 or call.axis != "positions":
            continue
        _, heads, length, features = tensors.query.values.shape
        key = call.module_class, heads, features, tensors.key.values.shape[1], call.query_len == call.key_len
        if heads > 1 and length >= LEAST_ROWS_MERGED and module_at(subject.module, tensors.site) is not None:
            found.setdefault(key, tensors)
    return list(found.values())[:MOST_ATTENTIONS]


# -- split -------------------------------------------------------------------------------------------------------------


def _split(subject: Subject, calls: list[CallTensors]) -> Iterator[LawAnswer]:
    entrances = {call.site: entrance for call in calls if (entrance := _entrance(subject, call)) is not None}
    taken: list[str] = []
    changes: dict[str, Any] = {}
    with ExitStack() as stack:
        for site, entrance in list(entrances.items()):
            if any(path in upwards(entrance.path) or entrance.path in upwards(path) for path in taken):
                del entrances[site]  # of two nested modules, only one can be judged in a run
                continue
            taken.append(entrance.path)
            stack.enter_context(_entering(subject, entrance))
            if entrance.path == "":
                changes |= _content_changed(subject, entrance)
        # Behind the modules that were changed nothing is judged.
        stack.enter_context(ended_after(subject.module, {entrance.path for entrance in entrances.values()}))
        again = run_traced(subject, changes).calls if entrances else {}
    for call in calls:
        after = again.get((call.site, call.index))
        if call.site in entrances and after is not None:
            yield from _judged_split(call, after, entrances[call.site])


def _entrance(subject: Subject, call: CallTensors) -> _Entrance | None:
    """Return the innermost module that takes (B, N, D), (N, B, D) or (N, D), with a quarter of q's numbers or more.

    For the model itself, ids are accepted as well.
    """
    batch, heads, length, features = call.query.values.shape
    run = traced(subject)
    for path in upwards(call.site):
        entering = run.passages[path].takes if path in run.passages else None
        if entering is not None and entering.numel() * 4 >= batch * length * heads * features:
            layout = _layout(entering.shape, batch, length)
            if layout is not None:
                return _Entrance(path, length // 3, length, layout)
        if path == "":
            tokens = [content for content in contents(subject) if content.tensor.shape[:2] == (batch, length)]
            known = tokens and tokens[0].ids and path in run.passages  # TorchScript calls no hook that notes it
            return _Entrance(path, length // 3, length, "BND") if known else None
    return None


def _layout(shape: Sequence[int], batch: int, length: int) -> str | None:
    """Return the layout of an input's tokens, or None if it is unknown."""
    if len(shape) == 2:
        return "ND" if batch == 1 and shape[0] == length else None
    if len(shape) == 3:
        return {(batch, length): "BND", (length, batch): "NBD"}.get((shape[0], shape[1]))
    if len(shape) != 4 or shape[0] != batch:
        return None
    return "BChw" if shape[2] * shape[3] == length else "BhwC" if shape[1] * shape[2] == length else None


def _entering(subject: Subject, entrance: _Entrance) -> Any:
    """Add noise to one token of the first sample in the module's input, and restore the module's output."""
    module = module_at(subject.module, entrance.path)
    before = traced(subject).passages[entrance.path]
    assert module is not None
    if before.takes is None or (entrance.path == "" and contents(subject) and contents(subject)[0].ids):
        return exchanged(module, None, None)
    generator = torch.Generator().manual_seed(subject.seed)

    def entering(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first = first_tensor((args, kwargs))
        if first is None:
            return args, kwargs
        # Contiguous, so that `_token` gives a view that can be written to.
        changed = first.clone(memory_format=torch.contiguous_format)
        row = _token(changed, entrance)
        spread = float(first.double().square().mean().sqrt()) or 1.0
        row += (torch.randn(row.shape, generator=generator) * (CHANGE_SIZE * spread)).to(row)

        def exchange(value: Any) -> Any:
            return changed if value is first else value

        return tuple(map(exchange, args)), {name: exchange(value) for name, value in kwargs.items()}

    return exchanged(module, entering, lambda output: restored(output, before.gives))


def _token(tensor: Tensor, entrance: _Entrance) -> Tensor:
    """Return the channels of the token in the first sample, as a view of the tensor."""
    if entrance.layout == "ND":
        return tensor[entrance.token]
    if entrance.layout == "NBD":
        return tensor[entrance.token, 0]
    tokens = tensor[0].flatten(1).T if entrance.layout == "BChw" else tensor[0].flatten(0, -2)
    return tokens[entrance.token]


def _content_changed(subject: Subject, entrance: _Entrance) -> dict[str, Tensor]:
    content = contents(subject)[0]
    if not content.ids:
        return {}
    marked = torch.zeros(content.tensor.shape[:2], dtype=torch.bool)
    marked[0, entrance.token] = True
    return {content.name: other_content(subject, content, marked, specials=True)}


def _judged_split(before: CallTensors, after: CallTensors, entrance: _Entrance) -> Iterator[LawAnswer]:
    where, judged, apart = (0, entrance.token), False, False
    for name in ("query", "key", "value"):
        one, two = getattr(before, name).values, getattr(after, name).values
        if one.dim() != 4 or one.shape != two.shape:
            continue
        first = _own_heads(one)
        cells = moved_entries(one, two)[:, first].any(-1).cpu()
        # A single head of keys (multi-query attention) can't be split wrongly.
        if not cells.any() or len(first) == 1:
            continue
        by_view = split_by_view(cells, one.shape[-1], entrance.tokens, where)
        if by_view:
            yield _broken_split(before.site, name, cells, where)
            return
        apart |= by_view is None
        judged = True
    if apart:
        yield law_not_asked(LAW, _about(SPLIT), Message("laws.place.own_rows"))
    elif judged:
        yield law_holds(LAW, _about(SPLIT))


def _own_heads(values: Tensor) -> list[int]:
    """Return the heads that differ from the head before. Grouped keys are repeated, so this keeps one a group."""
    heads = range(values.shape[1])
    return [head for head in heads if not head or not torch.equal(values[:, head], values[:, head - 1])]


def _broken_split(site: str, name: str, cells: Tensor, where: tuple[int, int]) -> LawAnswer:
    reached = cells.any(2).any(0).nonzero()[:, 0].tolist()
    rows = cells.any(1).any(0).nonzero()[:, 0].tolist()
    heads = Message("laws.place.some_heads", count=len(reached), heads=cells.shape[1])
    if len(reached) == 1:
        heads = Message("laws.place.one_head", head=reached[0])
    span = Message("laws.place.rows", first=rows[0], last=rows[-1])
    if len(rows) == 1:
        span = Message("laws.place.one_row", row=rows[0])
    side = Message(f"laws.place.side.{name}")
    message = Message("laws.place.split", token=where[1], heads=heads, rows=span, side=side)
    fix, source = Message("laws.place.fix_split"), Message("laws.place.source")
    return law_broken(LAW, _about(SPLIT), "warn", site, message, fix, source, value=float(len(rows)))


# -- merge -------------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Merging:
    """One attention with a change at the marked rows (B, H, L) of its output, and the answer of a module, if any."""

    call: CallTensors
    cells: Tensor
    disturbed: Disturbed
    answer: LawAnswer | None = None


def _merged(subject: Subject, calls: list[CallTensors]) -> Iterator[LawAnswer]:
    merging = [_merging(call, subject.seed) for call in calls]
    early = may_end_early(subject.module)
    with ExitStack() as stack:
        stack.enter_context(fast_path_off())
        for one in merging:
            for path in upwards(one.call.site):
                stack.enter_context(_leaving(subject, merging, one, path, early))
            stack.enter_context(one.disturbed)
        subject.run({})
    for one in merging:
        if one.answer is not None:
            yield one.answer


def _merging(call: CallTensors, seed: int) -> _Merging:
    """Change four rows, each of one head.

    A view keeps rows of one head together, far from their right place. If rows are only in another
    order, there are still four.
    """
    output = call.output
    batch, heads, length, _ = output.shape
    cells = torch.zeros(batch, heads, length, dtype=torch.bool)
    for place in ((0, heads - 1, 1), (0, heads - 1, 2), (batch - 1, heads // 2, 2), (batch - 1, heads // 2, 3)):
        cells[place] = True
    spread = float(output.double().square().mean().sqrt()) or 1.0
    noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed)).to(output) * (CHANGE_SIZE * spread)
    addend = noise * cells[..., None].to(output.device)
    return _Merging(call, cells, Disturbed(output, addend))


def _leaving(subject: Subject, merging: Sequence[_Merging], one: _Merging, path: str, early: bool) -> Any:
    module, run = module_at(subject.module, path), traced(subject)
    if module is None or path not in run.passages:
        return ExitStack()
    before = run.passages[path].gives

    def leaving(output: Any) -> Any:
        if one.disturbed.done and one.answer is None:
            one.answer = _judged_merge(one, first_tensor(before), first_tensor(output))
            if early and all(other.answer is not None for other in merging):
                raise RunEnded
            return None if one.answer is None else restored(output, before)
        return None

    return exchanged(module, None, leaving)


def _judged_merge(one: _Merging, before: Tensor | None, after: Tensor | None) -> LawAnswer | None:
    """Return the answer, or None if the module's output has no rows, or still has separate heads."""
    if before is None or after is None or before.shape != after.shape or before.dim() < 2:
        return None
    _, heads, length, features = one.call.output.shape
    if before.shape[1:] in ((heads, length, features), (length, heads, features)):
        return None
    differ = moved_entries(before, after).cpu()
    layouts = [differ, differ.movedim(1, -1)] if differ.dim() > 2 else [differ]
    rows = [layout.flatten(0, -2).any(1) for layout in layouts]  # channels last, or first as in (B, C, h, w)
    if any(merged_right(moved_rows, one.cells) for moved_rows in rows):
        return law_holds(LAW, _about(MERGE))
    # heads.reshape(B, L, H * E) without the transpose before it: numbers of one head stay together
    counts = (
        merged_by_view(layout, one.call.output.shape, one.cells, channels_first=bool(place))
        for place, layout in enumerate(rows)
    )
    count = next((number for number in counts if number is not None), None)
    if count is None:
        return None
    message = Message("laws.place.merged", row=length // 2, count=count)
    fix, source = Message("laws.place.fix_merge"), Message("laws.place.source")
    return law_broken(LAW, _about(MERGE), "warn", one.call.site, message, fix, source, value=float(count))

"""Law `samples`: the other samples of a batch move no output of this sample.

Changed: the other samples are left out and, if that moves something, have other content and this sample's masks.
Compared: the outputs with one entry for each sample, at the sample that stayed. It catches a forgotten `batch_first`
(attention over the batch), a mask tiled over heads in another order than samples, and a view that mixes samples.
The run of one sample alone also shows which axis is that of samples. A graph network, whose first axis is nodes, raises
or has no such outputs. A similarity of every image with every text is not an output of one sample.
Samples may see one another by an input that groups them, (B,) of whole numbers, as the series of Chronos-2 by
`group_ids`. The law is kept if samples of other groups move nothing, and if in groups of one sample none moves another.
Not asked: if something moves along a first axis that may be positions (`batch_first=False`), and neither a name, a mask
nor an output tells; if the model takes no batch.
The law `modes` shares the two runs: the batch, and one sample alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sqrtdk.audit.records import LawAnswer
from sqrtdk.laws.answers import calls_inside, law_broken, law_holds
from sqrtdk.laws.first_place import Protected, first_place
from sqrtdk.laws.inputs import Content, contents, lengths, mask_inputs, other_content
from sqrtdk.laws.moved import moved_entries
from sqrtdk.laws.subject import NotAsked, Subject
from sqrtdk.messages import Message

LAW = "samples"
_UNKNOWN_AXIS = "laws.samples.unknown_axis"
_LABELS = re.compile(r"label|target|length")
MOST_SAMPLES = 3  # number of samples to run if the inputs have one
# Inputs whose first axis is the batch in all models of Hugging Face.
_BATCH_FIRST = re.compile(r"^(decoder_)?(input_ids|inputs_embeds|pixel_values|input_features|input_values)$")


@dataclass(slots=True, eq=False)
class Batches:
    """The same sample in a batch and alone.

    Attributes:
        many: The model with several samples.
        single: The same model with one of them.
        size: Number of samples.
        stays: Number of the sample that `single` has.
        names: Names of the outputs with one entry for each sample.
        known: Whether the first axis is known to be that of samples, rather than guessed because nothing moves.
        apart: Whether its outputs are the same in the batch as alone; None if no law has looked.
        mixed: Whether its outputs moved with the other samples; None if no law has looked.
        moves: Whether any output did.
    """

    many: Subject
    single: Subject
    size: int
    stays: int
    names: list[str]
    known: bool
    apart: bool | None = None
    mixed: bool | None = None
    moves: bool = False


class _DroppedSamples(NotAsked):
    """Raised if a batch that was given has the outputs of one of its samples alone."""


def ask(subject: Subject) -> Iterator[LawAnswer]:
    """Yield one answer: whether the outputs of a sample are independent of the other samples in its batch.

    The answer is also "kept", with the reason, if an input declares that samples are grouped.

    Raises:
        NotAsked: No output moves with the content of the inputs, or the axis of the batch is not known.
    """
    try:
        found = batches(subject)
    except _DroppedSamples as dropped:
        fix, source = Message("laws.samples.fix_dropped"), Message("laws.samples.source")
        yield law_broken(LAW, contents(subject)[0].name, "warn", None, dropped.reason, fix, source)
        return
    # A sample that has its outputs without the others as well has them whatever the others are, if no content decides
    # how long an output is: a sample of speech that others make longer is padded, and its own is not seen to be.
    if found.known and of_given_lengths(found) and same_alone(found) and others_differ(found):
        subject.moves = True
        changes, count = _of_other_end(found, {}, 0)
        found.mixed = count > 0
        if not count:
            yield law_holds(LAW)
            return
    else:
        changes = _others_changed(found.many, torch.arange(found.size) != found.stays, found.stays)
        changes, count = _of_other_end(found, changes, _count_moved(found, changes))
        found.mixed = count > 0
    if count and not found.known:
        raise NotAsked(Message(_UNKNOWN_AXIS))
    if not found.moves:
        raise NotAsked(Message("laws.asking.nothing_moves"), by_length=True)
    subject.moves = True
    if not count:
        yield law_holds(LAW)
    elif (grouped := _grouped_by(found)) is not None:
        yield law_holds(LAW, "", Message("laws.samples.grouped", name=grouped))
    else:
        yield _broken(found.many, changes, found.stays, count)


def _of_other_end(found: Batches, changes: dict[str, Tensor], count: int) -> tuple[dict[str, Tensor], int]:
    """Return changes and how many outputs they moved: of the other end of the batch if none at this one.

    x + x[:1] leaves the first sample as it is, and x + x[-1:] the last one.
    """
    if count or found.size < 2 or found.stays not in (0, found.size - 1):
        return changes, count
    other = found.size - 1 - found.stays
    changes = _others_changed(found.many, torch.arange(found.size) != other, other)
    count = _count_moved(found, changes, at=other)
    found.stays = other if count else found.stays
    return changes, count


def of_given_lengths(found: Batches) -> bool:
    """Return whether each output of three or more axes has an axis (beyond the batch) as long as some input."""
    given = {content.length for content in contents(found.many)}
    outputs = (found.many.base[name] for name in found.names)
    return all(x.dim() < 3 or not given.isdisjoint(x.shape[1:]) for x in outputs)


def same_alone(found: Batches) -> bool:
    """Return whether a sample has the same outputs, up to rounding, in the batch as alone; kept in `found.apart`."""
    if found.apart is None:
        before, own = found.many.base, slice(found.stays, found.stays + 1)
        alone = {name: before[name].clone() for name in found.names}
        for name, outputs in alone.items():
            outputs[own] = found.single.base[name]
        found.apart = not any(bool(moved_entries(before[name], alone[name]).any()) for name in found.names)
    return found.apart


def others_differ(found: Batches) -> bool:
    """Return whether some sample of the batch has other outputs than the compared one, beyond rounding."""
    before, own = found.many.base, slice(found.stays, found.stays + 1)
    return any(bool(moved_entries(one := before[name], one[own].expand_as(one)).any()) for name in found.names)


def mixed(found: Batches) -> bool:
    """Return whether a sample's outputs change when the other samples of its batch get other content.

    The result is kept in `found.mixed`; the model runs only if no earlier law has set it.
    """
    if found.mixed is None:
        changes = _others_changed(found.many, torch.arange(found.size) != found.stays, found.stays)
        found.mixed = _count_moved(found, changes) > 0
    return found.mixed


def _count_moved(
    found: Batches, changes: dict[str, Tensor], subject: Subject | None = None, at: int | None = None
) -> int:
    """Return how many outputs moved at the sample that stayed (or `at`), with changes of the others."""
    wide = subject or found.many
    before, after = wide.base, wide.run(changes)
    moved = [moved_entries(*_in_common(before[name], after[name])) for name in found.names]
    found.moves |= any(bool(entries.any()) for entries in moved)
    return sum(bool(entries[found.stays if at is None else at].any()) for entries in moved)


def _in_common(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """Return what both have: the longest sample decides how far the others are padded."""
    if before.dim() != after.dim():
        return before, after
    common = tuple(slice(min(sizes)) for sizes in zip(before.shape, after.shape, strict=True))
    return before[common], after[common]


def _grouped_by(found: Batches) -> str | None:
    """Return the input that says which samples see one another, or None if there is none.

    Changed: the samples of other groups; then all others, in groups of one sample each.
    """
    wide, places = found.many, torch.arange(found.size)
    sizes = set(lengths(wide))  # lengths and labels form no groups
    for name, value in wide.tensors.items():
        if value.is_floating_point() or name in sizes or _LABELS.search(name):
            continue
        if value.numel() != found.size or value.shape[0] != found.size:
            continue
        others = value.flatten().cpu() != value.flatten()[found.stays].cpu()
        try:
            if others.any() and _count_moved(found, _others_changed(wide, others, found.stays)):
                continue
            apart = wide.over({**wide.inputs, name: places.to(value).reshape(value.shape)})
            if not _count_moved(found, _others_changed(apart, places != found.stays, found.stays), apart):
                return name
        except NotAsked:  # the model takes no other numbers there
            continue
    return None


def batches(subject: Subject) -> Batches:
    """Return the two runs; they are made once and kept.

    Raises:
        NotAsked: It is unknown what the samples of the inputs or of the outputs are.
    """
    if subject.batches is None:
        try:
            subject.batches = _batches(subject)
        except NotAsked as reason:
            subject.batches = reason
    if isinstance(subject.batches, NotAsked):
        raise subject.batches
    assert isinstance(subject.batches, Batches)
    return subject.batches


def _batches(subject: Subject) -> Batches:
    found = contents(subject)
    if not found:
        raise NotAsked(Message("laws.samples.no_content"))
    batch = found[0].tensor.shape[0]
    if any(content.tensor.shape[0] != batch for content in found):
        raise NotAsked(Message("laws.samples.first_axes_differ"))
    if any(not isinstance(value, Tensor | bool | int | float | str | None) for value in subject.inputs.values()):
        raise NotAsked(Message("laws.samples.no_tensor"))
    stays = MOST_SAMPLES // 2 if batch == 1 else _most_hidden(subject, batch)
    wide = _widened(subject) if batch == 1 else subject
    alone = subject if batch == 1 else _sliced(subject, batch, stays)
    batch = MOST_SAMPLES if batch == 1 else batch
    single, before = alone.base, wide.base
    names = [name for name in single if name in before and _one_a_sample(single[name], before[name], batch)]
    if not names:
        number = _only_sample(wide, batch)
        if number is None:
            raise NotAsked(Message("laws.samples.no_output_per_sample"))
        text = Message("laws.samples.dropped", batch=batch, number=number + 1)
        was_given = wide is subject and _first_axis_is_samples(wide, batch, [])
        raise _DroppedSamples(text) if was_given else NotAsked(text)
    known = _first_axis_is_samples(wide, batch, [before[name] for name in names])
    if not known:
        if wide is not subject:
            raise NotAsked(Message(_UNKNOWN_AXIS))
        stays = batch - 1  # if the axis is positions, this is the one that causal attention moves too
        alone = _sliced(subject, batch, stays)
    return Batches(wide, alone, batch, stays, names, known)


def _only_sample(wide: Subject, batch: int) -> int | None:
    """Return the number of the sample that alone has the outputs of the whole batch, as with x[0]; None for none."""
    ends = {number: _sliced(wide, batch, number).base for number in (0, batch - 1)}
    first, last = ends.values()
    names = [name for name, x in wide.base.items() if name in first and name in last and x.shape == first[name].shape]
    if not any(first[name].shape == last[name].shape and _differ(first[name], last[name]) for name in names):
        return None
    for number, alone in ends.items():
        if all(
            alone[name].shape == wide.base[name].shape and not _differ(wide.base[name], alone[name]) for name in names
        ):
            return number
    return None


def _differ(one: Tensor, other: Tensor) -> bool:
    return bool(moved_entries(one, other).any())


def _one_a_sample(single: Tensor, many: Tensor, batch: int) -> bool:
    return bool(single.dim()) and single.shape[0] == 1 and many.shape == (batch, *single.shape[1:])


def _most_hidden(subject: Subject, batch: int) -> int:
    """Return the sample with the most padding, because mixed-up masks show there."""
    counts = torch.zeros(batch)
    for mask in mask_inputs(subject):
        if mask.hidden is not None and mask.hidden.shape[0] == batch:
            counts += mask.hidden.sum(1).cpu()
    return int(counts.argmax())


def _widened(subject: Subject) -> Subject:
    """Repeat the only sample three times, and give the first and the last copy other content."""
    single = {name: x for name, x in subject.inputs.items() if isinstance(x, Tensor) and x.shape[:1] == (1,)}
    wide = subject.over(subject.inputs | {name: x.repeat_interleave(MOST_SAMPLES, 0) for name, x in single.items()})
    others = torch.arange(MOST_SAMPLES) != MOST_SAMPLES // 2
    return wide.over(wide.inputs | {content.name: other_content(wide, content, others) for content in contents(wide)})


def _sliced(subject: Subject, batch: int, stays: int) -> Subject:
    return subject.over(
        {
            name: value[stays : stays + 1] if isinstance(value, Tensor) and value.shape[:1] == (batch,) else value
            for name, value in subject.inputs.items()
        }
    )


def _others_changed(subject: Subject, others: Tensor, stays: int) -> dict[str, Tensor]:
    changes = {content.name: other_content(subject, content, others, salt=2) for content in contents(subject)}
    for mask in mask_inputs(subject):
        if mask.tensor.shape[0] == len(others):
            # A mask that is tiled over samples and heads in the wrong order gives this sample another one's.
            where = others.to(mask.tensor.device).reshape(-1, *[1] * (mask.tensor.dim() - 1))
            changes[mask.name] = torch.where(where, mask.tensor[stays : stays + 1], mask.tensor)
    return changes


def _first_axis_is_samples(subject: Subject, batch: int, outputs: list[Tensor]) -> bool:
    """Return whether the first axis is known to be that of samples, and not of positions as in (L, B, E)."""
    found: list[Content] = contents(subject)
    if any(_BATCH_FIRST.search(content.name) or content.length is None for content in found):
        return True
    if any(mask.hidden is not None and mask.tensor.shape[0] == batch for mask in mask_inputs(subject)):
        return True
    lengths = {content.length for content in found} - {batch}
    if any(not lengths & set(output.shape[1:]) for output in outputs):
        return True  # positions were reduced, but the first axis was not
    rows = [call for call in calls_inside(subject, None) if call.query_len in lengths and call.axis == "positions"]
    return any(call.batch % batch == 0 and call.batch not in lengths for call in rows)


def _broken(subject: Subject, changes: dict[str, Tensor], stays: int, count: int) -> LawAnswer:
    content = contents(subject)[0]
    batch, length = content.tensor.shape[0], content.length or 1
    marked = torch.zeros(batch, length, dtype=torch.bool)
    marked[stays] = True
    site = first_place(subject, {}, changes, Protected(marked))
    message, fix = Message("laws.samples.mix"), Message("laws.samples.fix")
    if any(call.query_len == batch != length and call.batch == length for call in calls_inside(subject, site)):
        message = Message("laws.samples.mix_over_batch_axis", rows=batch, length=length)
        fix = Message("laws.samples.fix_batch_first")
    return law_broken(LAW, content.name, "fail", site, message, fix, Message("laws.samples.source"), value=float(count))

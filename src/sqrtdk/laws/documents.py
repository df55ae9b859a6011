"""Law `documents`: if several documents share a row, the content of one moves no output of another.

Documents begin where `position_ids` restart, or at `cu_seqlens`. Changed: the content of the first document. Compared:
the outputs at the positions of the others. It catches packed rows under a plainly causal mask.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sqrtdk.audit.records import LawAnswer
from sqrtdk.laws.answers import calls_inside, has_attention, law_broken, law_holds
from sqrtdk.laws.first_place import Protected, first_place
from sqrtdk.laws.inputs import contents, other_content, restarts
from sqrtdk.laws.moved import moved_positions, position_axes
from sqrtdk.laws.subject import NotAsked, Subject
from sqrtdk.messages import Message, joined

LAW = "documents"
_POSITION_IDS = "position_ids"
_OFFSET_INPUTS = ("cu_seqlens", "cu_seqlens_q", "cu_seq_lens_q")


def ask(subject: Subject) -> Iterator[LawAnswer]:
    """Yield one answer: whether other content of the first of several packed documents leaves the others as they are.

    Raises:
        NotAsked: The inputs pack no documents, the model has no output per token, or no output moves.
    """
    starts, document = _documents(subject)
    found = [content for content in contents(subject) if content.tensor.shape[:2] == document.shape]
    if not found:
        raise NotAsked(Message("laws.documents.no_content", name=starts))
    first = document == 0
    changes = {content.name: other_content(subject, content, first, specials=True) for content in found}
    before, after = subject.base, subject.run(changes)
    judged = moves = False
    for name, axis in position_axes(before, *document.shape).items():
        one = before[name]
        if name not in after or after[name].shape != one.shape:
            continue
        judged = True
        rows = moved_positions(one, after[name], axis).cpu()
        moves |= bool(rows.any())
        rows &= ~first.cpu()
        if rows.any():
            yield _broken(subject, changes, starts, document, rows)
            return
    if not judged:
        raise NotAsked(Message("laws.asking.no_output_per_token"), by_length=True)
    if not moves:
        raise NotAsked(Message("laws.asking.nothing_moves"), by_length=True)
    yield law_holds(LAW)


def _broken(subject: Subject, changes: dict[str, Tensor], starts: str, document: Tensor, rows: Tensor) -> LawAnswer:
    site = first_place(subject, {}, changes, Protected(document > 0))
    worst = int(rows.sum(1).argmax())
    count, of = int(rows[worst].sum()), int((document[worst] > 0).sum())
    message: str = Message("laws.documents.seen", count=count, of=of)
    if starts in _OFFSET_INPUTS:
        message = Message("laws.documents.seen_by_offsets", name=starts, count=count, of=of)
    if any(call.mask is not None and call.mask.kind == "causal" for call in calls_inside(subject, site)):
        message = joined([message, Message("laws.documents.only_causal")])
    fix = Message("laws.documents.fix" if has_attention(subject, site) else "laws.documents.fix_state")
    source = Message("laws.documents.source_offsets" if starts in _OFFSET_INPUTS else "laws.documents.source")
    return law_broken(LAW, starts, "fail", site, message, fix, source, value=float(count), positions=rows[worst])


def _documents(subject: Subject) -> tuple[str, Tensor]:
    """Return the input that says where documents begin, and the number of the document of each position, (B, n).

    Raises:
        NotAsked: Every row is one document.
    """
    tensors = subject.tensors
    positions = tensors.get(_POSITION_IDS)
    if positions is not None and positions.dim() == 2 and positions.shape[1] > 1:
        documents = restarts(positions)
        # Positions of one row serve for all samples.
        if documents.shape[0] == 1:
            batch = max((content.tensor.shape[0] for content in contents(subject)), default=1)
            documents = documents.expand(batch, -1)
        if bool((documents.max(1).values > 0).all()):
            return _POSITION_IDS, documents
    name = next((name for name in _OFFSET_INPUTS if name in tensors), "")
    offsets = tensors.get(name)
    if offsets is not None and offsets.dim() == 1 and offsets.numel() > 2:
        sizes = offsets.diff().long()  # cu_seqlens = [0, 3, 8]: documents of 3 and 5 tokens
        return name, torch.repeat_interleave(torch.arange(len(sizes), device=offsets.device), sizes)[None]
    if name:
        raise NotAsked(Message("laws.documents.one_document_by_offsets", name=name))
    raise NotAsked(Message("laws.documents.one_document"))

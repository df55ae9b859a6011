"""Law `padding`: content at hidden positions moves no other output, and flipping a mask moves some output.

Changed: the content at positions that a (batch, length) mask hides; if it hides none, a third of the positions is
hidden first. Compared: the outputs at the other positions. Of outputs of another length, as in joint attention, at
most as many positions may move as are hidden.
Then the mask is changed: hidden positions are shown or, in a mask of another shape, a quarter of its columns is
flipped; lengths are halved. Some output has to move, or the argument never arrives. What padding sees does not matter.
Not asked: features that a convolution shortens, because its window reaches into the padding; and a mask of ones beside
position ids that restart, because these mark the documents.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from sqrtdk._wrappers import named_modules
from sqrtdk.audit.configs import module_at
from sqrtdk.audit.records import LawAnswer
from sqrtdk.laws.answers import calls_inside, has_attention, law_broken, law_holds, law_refused
from sqrtdk.laws.first_place import Protected, first_place
from sqrtdk.laws.inputs import (
    Content,
    MaskInput,
    content_of,
    contents,
    lengths,
    mask_inputs,
    other_content,
    restarts,
    special_ids,
)
from sqrtdk.laws.moved import any_moved, is_logits, moved_entries, moved_positions, position_axis
from sqrtdk.laws.rows import runs_of
from sqrtdk.laws.subject import NotAsked, Outputs, Subject
from sqrtdk.messages import Message, joined

LAW = "padding"
PADDING_LAW_SOURCE = "laws.padding.source"
_ONE_HIDDEN_IN = 3  # one in so many positions is hidden if the mask hides none
_CAUSAL_OR_WINDOW = ("causal", "causal_lower_right", "window")


def ask(subject: Subject) -> Iterator[LawAnswer]:
    """Yield for each mask, and for each input of lengths, whether the content at hidden positions has no influence.

    Raises:
        NotAsked: The inputs have neither.
    """
    found, sizes = list(mask_inputs(subject)), list(lengths(subject))
    if not (found or sizes):
        raise NotAsked(Message("laws.padding.no_mask"))
    for mask in found:
        try:
            yield _of_mask(subject, mask)
        except NotAsked as error:
            yield law_refused(LAW, mask.name, error)
    for name in sizes:
        try:
            yield _of_lengths(subject, name)
        except NotAsked as error:
            yield law_refused(LAW, name, error)


def _of_mask(subject: Subject, mask: MaskInput) -> LawAnswer:
    if mask.name.startswith("pixel") and not any(content.length is None for content in contents(subject)):
        raise NotAsked(Message("laws.padding.no_pixels"))
    if mask.hidden is None:
        return _effect(subject, mask.name, _flipped(mask.tensor))
    content = next(iter(content_of(subject, mask)), None)
    if content is None:
        return _effect(subject, mask.name, _flipped(mask.tensor))
    hidden = mask.hidden
    if not hidden.any() and _restarts(subject):
        raise NotAsked(Message("laws.padding.restarts"))
    causal = _causal_rows(subject, content)
    # Rows that are causal anyway only show a hidden token if a shown one follows it.
    tells = hidden[:, :-1] & ~hidden[:, 1:] if causal else hidden
    if not tells.any() or bool(hidden.all()):
        hidden = _positions_to_hide(subject, content, mask.tensor)
    if not hidden.any():
        raise NotAsked(Message("laws.padding.all_special"), by_length=True)
    hides, shows = mask.hiding(hidden), mask.hiding(torch.zeros_like(hidden))
    # Two contents for the hidden positions: the outputs must not tell them apart.
    changes = [
        {mask.name: hides, content.name: other_content(subject, content, hidden, salt, specials=True)}
        for salt in (3, 4)
    ]
    reaches = _keys_are_tokens(subject, content)
    runs = runs_of(subject, [changes[0], {**changes[0], mask.name: shows}, *changes[1 : 1 + reaches]])
    arrives = any_moved(runs[0], runs[1])
    seen, of, positions = 0, 0, None
    if reaches:
        seen, of, positions = _count_moved(runs[0], runs[2], hidden, _hidden_elsewhere(subject, mask))
    if arrives and not seen:
        return law_holds(LAW, mask.name)
    if not seen:
        return _no_effect(mask.name)
    # All positions moved, and they are not those of the mask: a decoder's, by cross-attention.
    elsewhere = positions is not None and seen == of != int((~hidden).sum(1).max())
    site = first_place(subject, changes[0], changes[1], Protected(~hidden, rest="all" if elsewhere else "samples"))
    severity = "fail"
    if arrives and of and site and _mixes_neighbours(subject, site):
        severity = "note"
    what = Message("laws.padding.content_moves")
    if of:
        what = Message("laws.padding.content_moves_positions", count=seen, of=of)
    share = Message("laws.padding.share", count=int(hidden.sum(1).max()), length=hidden.shape[1])
    message: str = Message("laws.padding.seen", mask=mask.name, share=share, what=what)
    if not arrives:
        message = joined([message, Message("laws.padding.without_effect", mask=mask.name)])
    fix, source = Message("laws.padding.fix_seen", mask=mask.name), Message(PADDING_LAW_SOURCE)
    if not has_attention(subject, site):
        fix = Message("laws.padding.fix_state", mask=mask.name)
    value = float(max(seen, 1))
    return law_broken(LAW, mask.name, severity, site, message, fix, source, value=value, positions=positions)


def _mixes_neighbours(subject: Subject, site: str) -> bool:
    """Return whether the module at a site mixes neighbours by itself, so that padding reaches into it.

    FastSpeech 2's feed-forward and ConvBERT's heads convolve; MobileBERT's embeddings hold those of both neighbours.
    """
    place = module_at(subject.module, site)
    if place is None:
        return False
    if any(isinstance(part, nn.Conv1d | nn.Conv2d) and max(part.kernel_size) > 1 for part in place.modules()):
        return True
    order = {path: number for number, (path, _) in enumerate(named_modules(subject.module))}
    first = min((order.get(call.site, 0) for call in calls_inside(subject, None)), default=0)
    return next(calls_inside(subject, site), None) is None and order[site] < first


def _hidden_elsewhere(subject: Subject, mask: MaskInput) -> dict[int, Tensor]:
    """Return the positions that other masks hide, by length: rows of padding may see anything."""
    others = (other for other in mask_inputs(subject) if other.name != mask.name and other.hidden is not None)
    return {other.hidden.shape[1]: other.hidden.cpu() for other in others if other.hidden is not None}


def _count_moved(
    before: Outputs, after: Outputs, hidden: Tensor, elsewhere: dict[int, Tensor]
) -> tuple[int, int, Tensor | None]:
    """Return how many positions moved wrongly, of how many (0 if there are none), and which in the worst sample."""
    batch, length = hidden.shape
    hidden = hidden.cpu()
    for name, one in before.items():
        two = after.get(name)
        if two is None or one.dim() < 2 or one.shape[0] != batch or two.shape != one.shape:
            continue
        if is_logits(one, one.shape[-1]) or one.dim() > 4:  # (2, B, H, n, E): k and v of a layer, with B = 2 by chance
            continue
        axis = position_axis(one, batch, length)
        if axis is not None:
            rows = _not_hidden_elsewhere(moved_positions(one, two, axis).cpu() & ~hidden, elsewhere)
            if rows.any():
                worst = int(rows.sum(1).argmax())
                return int(rows[worst].sum()), int((~hidden[worst]).sum()), rows[worst]
        elif one.dim() == 2:
            if moved_entries(one, two)[~hidden.all(1).to(one.device)].any():
                return 1, 0, None
        else:  # text and image in one sequence: the hidden tokens are among the output's positions
            rows = _not_hidden_elsewhere(moved_positions(one, two, 2 if one.dim() == 4 else 1).cpu(), elsewhere)
            over = rows.sum(1) - hidden.sum(1)
            if bool((over > 0).any()):
                worst = int(over.argmax())
                return int(rows[worst].sum()), rows.shape[1], rows[worst]
    return 0, 0, None


def _not_hidden_elsewhere(rows: Tensor, elsewhere: dict[int, Tensor]) -> Tensor:
    """Return the rows without those that another mask hides."""
    hidden = elsewhere.get(rows.shape[1])
    return rows if hidden is None or hidden.shape != rows.shape else rows & ~hidden


def _keys_are_tokens(subject: Subject, content: Content) -> bool:
    """Return whether an attention has a key for each token. A convolution that shortens features mixes padding in."""
    assert content.length is not None
    return content.ids or any(call.key_len >= content.length for call in calls_inside(subject, None))


def _causal_rows(subject: Subject, content: Content) -> bool:
    """Return whether the rows of the content's tokens see only earlier keys."""
    calls = (call for call in calls_inside(subject, None) if call.query_len == content.length)
    masks = [call.mask for call in calls if call.self_attention is not False]
    return any(mask is not None and (mask.kind in _CAUSAL_OR_WINDOW or mask.least == 0) for mask in masks)


def _positions_to_hide(subject: Subject, content: Content, mask: Tensor) -> Tensor:
    """Choose a third of the positions to hide: of ids the middle, of features the end, as their masks may be lengths.

    The first and last token, special ids, and the largest id are not hidden, because models read their output there.
    """
    length = mask.shape[1]
    count = max(length // _ONE_HIDDEN_IN, 1)
    first = (length - count) // 2 if content.ids else length - count
    place = torch.arange(length, device=mask.device)
    hidden = ((place >= first) & (place < first + count)).expand(mask.shape).clone()
    if content.ids:
        special = torch.tensor(sorted(special_ids(subject.config)), device=mask.device)
        hidden &= ~torch.isin(content.tensor, special) & (content.tensor != content.tensor.max())
    return hidden


def _restarts(subject: Subject) -> bool:
    positions = subject.tensors.get("position_ids")
    return positions is not None and positions.dim() == 2 and bool(restarts(positions).any())


def _flipped(mask: Tensor) -> Tensor:
    """Flip the last quarter of a mask's columns; of a pixel mask all but a quarter, because patches count."""
    size, of = mask.shape[-1], (1, 4) if mask.dim() != 3 or mask.shape[-1] != mask.shape[-2] else (3, 4)
    columns = torch.arange(size, device=mask.device) >= size - max(size * of[0] // of[1], 1)
    if mask.dtype is torch.bool:
        return mask ^ columns
    # An additive mask: 0 shows, a negative number hides.
    if mask.is_floating_point() and bool((mask < 0).any()):
        return torch.where(columns, torch.where(mask < 0, 0.0, mask.min()), mask)
    # An additive mask of zeros hides nothing, so columns are hidden.
    if mask.is_floating_point() and not mask.any():
        return torch.where(columns, -1e4, mask)
    return torch.where(columns, 1 - mask, mask)


def _of_lengths(subject: Subject, name: str) -> LawAnswer:
    value = subject.tensors[name]
    # Rounded up: no length becomes 0.
    return _effect(subject, name, value / 2 if value.is_floating_point() else (value + 1) // 2)


def _effect(subject: Subject, name: str, changed: Tensor) -> LawAnswer:
    return law_holds(LAW, name) if any_moved(subject.base, subject.run({name: changed})) else _no_effect(name)


def _no_effect(name: str) -> LawAnswer:
    message, fix = Message("laws.padding.no_effect", mask=name), Message("laws.padding.fix_no_effect", mask=name)
    return law_broken(LAW, name, "warn", None, message, fix, Message(PADDING_LAW_SOURCE))

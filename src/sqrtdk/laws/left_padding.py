"""Law `left_padding`: the same tokens give the same outputs with padding on the left and on the right.

Changed: the padding of the inputs, or of the last quarter of the tokens, moves to the left, and with it every input
that has a number for each token. If forward takes positions, they count the tokens in both runs. Compared: the outputs
at tokens. It catches positions that count padding, attention that sees padding, and a mask aligned to one side.
Asked only of causal tokens, which see what is on their left and not what is on their right.
Not asked: if no argument hides padding; if attention is local by slot (chunks, blocks, hashes); if positions are
absolute and can't be given, which shows as hidden states that move before the first attention; if the mask moves
nothing at all, which the law `padding` reports.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sqrtdk.audit.records import LawAnswer
from sqrtdk.laws.answers import has_attention, law_broken, law_holds
from sqrtdk.laws.causal import tokens_of_decoder
from sqrtdk.laws.first_place import Protected, first_unlike, in_encoder, taken_by
from sqrtdk.laws.inputs import Content
from sqrtdk.laws.moved import any_moved, moved_entries, position_axis
from sqrtdk.laws.padded import Padded, mask_name, pad_both_sides, self_attentions, takes_positions
from sqrtdk.laws.rows import runs_of
from sqrtdk.laws.subject import NotAsked, Outputs, Subject
from sqrtdk.messages import Message
from sqrtdk.tracing.records import AttentionCall

LAW = "left_padding"


def ask(subject: Subject) -> Iterator[LawAnswer]:
    """Yield one answer: whether the outputs of the tokens are the same with padding on the left as on the right.

    Raises:
        NotAsked: No self-attention has a row for each token, one is not causal, the outputs are not finite, the model
            adds absolute positions that it can't be given, or the mask changes nothing.
    """
    named = subject.by_name()
    content = tokens_of_decoder(named)
    both = pad_both_sides(named, content)
    name = mask_name(named, content) or ""
    calls = self_attentions(named, content)
    if not calls:
        raise NotAsked(Message("laws.left_padding.no_rows"))
    if not all(_plain(call) for call in calls):
        raise NotAsked(Message("laws.left_padding.not_causal"))
    if not all(bool(x.isfinite().all()) for x in named.base.values()):
        raise NotAsked(Message("laws.left_padding.not_finite"))
    right, left = runs_of(named, [both.right.inputs, both.left.inputs])
    unlike = _unlike(both, right, left)
    if not bool(unlike.any()):
        yield law_holds(LAW, name)
        return
    if not takes_positions(named, content) and _absolute(both, calls[0].site, content):
        raise NotAsked(Message("laws.left_padding.absolute_positions"))
    open_mask = {name: torch.ones_like(both.left.inputs[name])}
    if not any_moved(left, both.left.run(open_mask)):
        raise NotAsked(Message("laws.asking.changes_nothing", name=name), by_length=True)
    site = first_unlike(
        (both.right, Protected(~both.hidden_right, rest="nothing")),
        (both.left, Protected(~both.hidden_left, rest="nothing")),
        decoder=content.name.startswith("decoder"),
    )
    worst = int(unlike.sum(1).argmax())
    count, of = int(unlike[worst].sum()), int((~both.hidden_left[worst]).sum())
    message = Message("laws.left_padding.differs", count=count, of=of)
    fix, source = Message("laws.left_padding.fix", mask=name), Message("laws.left_padding.source")
    if not has_attention(named, site):
        fix = Message("laws.left_padding.fix_state", mask=name)
    yield law_broken(LAW, name, "fail", site, message, fix, source, value=float(count), positions=unlike[worst])


def _plain(call: AttentionCall) -> bool:
    """Return whether rows see themselves and all keys before, or a window of these."""
    mask = call.mask
    return call.axis == "positions" and mask is not None and mask.least == 0 and mask.band is True


def _unlike(both: Padded, right: Outputs, left: Outputs) -> Tensor:
    """Return which positions of the left-padded run, (B, n), differ from the same tokens in the right-padded run.

    Raises:
        NotAsked: No output has a position for each token.
    """
    shown_right, shown_left = ~both.hidden_right, ~both.hidden_left
    rows: Tensor | None = None
    for name, one in right.items():
        axis = position_axis(one, *shown_right.shape)
        if axis != 1 or in_encoder(name) or name not in left or left[name].shape != one.shape:
            continue
        entries = moved_entries(one[shown_right.to(one.device)], left[name][shown_left.to(one.device)]).cpu()
        found = torch.zeros_like(shown_left)
        found[shown_left] = entries.reshape(len(entries), -1).any(1)
        rows = found if rows is None else rows | found
    if rows is None:
        raise NotAsked(Message("laws.asking.no_output_per_token"), by_length=True)
    return rows


def _absolute(both: Padded, site: str, content: Content) -> bool:
    batch, length = content.tensor.shape[:2]
    right, left = (taken_by(subject, site, batch, length) for subject in (both.right, both.left))
    if right is None or left is None:
        return True
    return bool(
        moved_entries(right[~both.hidden_right.to(right.device)], left[~both.hidden_left.to(left.device)]).any()
    )

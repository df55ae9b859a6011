"""Law `causal`: a later token moves no output of an earlier position.

Changed: the second half of the tokens (the decoder's, if there are two kinds). Compared: the outputs with these
positions, in the first half.
A broken law is `critical` if module or config say that the model is causal, or if the model returns keys for a cache,
because cached keys are computed without later tokens. A model that maps ids to logits over their vocabulary and says
nothing gets a note. A declared prefix, two directions or a lookahead is believed. A causal mask in a model whose config
says that attention is bidirectional breaks the law `configured`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import nn

from sqrtdk.audit.configs import field, module_at
from sqrtdk.audit.declared import config_at
from sqrtdk.audit.records import LawAnswer
from sqrtdk.audit.sight import lookahead, may_see_ahead, says_causal
from sqrtdk.laws.answers import calls_inside, law_broken, law_holds
from sqrtdk.laws.first_place import Protected, first_place
from sqrtdk.laws.inputs import DECODER, ENCODER, Content, contents, other_content
from sqrtdk.laws.moved import moved_positions, position_axes, position_axis
from sqrtdk.laws.subject import NotAsked, Outputs, Subject
from sqrtdk.messages import Message
from sqrtdk.tracing.records import AttentionCall

LAW = "causal"
_CACHE_OUTPUT = re.compile(r"past|cache|mems|present")


def ask(subject: Subject) -> Iterator[LawAnswer]:
    """Yield one answer."""
    content = tokens_of_decoder(subject)
    batch, length = content.tensor.shape[:2]
    cut = length // 2
    later = (torch.arange(length) >= cut).expand(batch, length)
    changes = {content.name: other_content(subject, content, later)}
    if torch.equal(changes[content.name], content.tensor):
        raise NotAsked(Message("laws.causal.all_special"))
    before, after = subject.base, subject.run(changes)
    axes = position_axes(before, batch, length)
    axes = {name: axis for name, axis in axes.items() if name in after and after[name].shape == before[name].shape}
    if not axes:
        raise NotAsked(Message("laws.asking.no_output_per_token"))
    rows = torch.stack([moved_positions(before[name], after[name], axis).cpu() for name, axis in axes.items()]).any(0)
    leaked = int(rows[:, :cut].any(0).sum())
    if not rows.any():
        raise NotAsked(Message("laws.causal.nothing_moves"))
    owned = [
        call for call in calls_inside(subject, None) if call.query_len == length and call.self_attention is not False
    ]
    if not leaked:
        yield law_holds(LAW, content.name)
        return
    why = _why_causal(subject, owned, before, batch, length)
    if why is None and not _language_model(subject, content, before):
        yield law_holds(LAW, content.name, Message("laws.causal.undeclared"))
        return
    if any(_ahead(subject, call) for call in owned):
        yield law_holds(LAW, content.name, Message("laws.causal.declared_otherwise"))
        return
    site = first_place(subject, {}, changes, Protected(~later))
    shown = rows[int(rows[:, :cut].sum(1).argmax())] & (torch.arange(length) < cut)
    severity = "note" if why is None else "critical"
    if why is None:
        message, fix = Message("laws.causal.sees_later"), Message("laws.causal.fix_sees_later")
    else:
        message = Message("laws.causal.earlier_moves", count=leaked, cut=cut, why=why)
        fix = Message("laws.causal.fix")
    source = Message("laws.causal.source")
    yield law_broken(LAW, content.name, severity, site, message, fix, source, value=float(leaked), positions=shown)


def tokens_of_decoder(subject: Subject) -> Content:
    """Return the tokens whose order counts: the decoder's, if there are two kinds.

    Raises:
        NotAsked: There are no tokens.
    """
    found = [content for content in contents(subject) if content.length is not None]
    decoder = [content for content in found if DECODER.search(content.name)]
    plain = [content for content in found if not ENCODER.search(content.name)]
    if not (decoder or plain):
        raise NotAsked(Message("laws.asking.no_tokens"))
    return (decoder or plain)[0]


def _why_causal(
    subject: Subject, calls: list[AttentionCall], outputs: Outputs, batch: int, length: int
) -> Message | None:
    """Return what says that the model is causal, or None if nothing does."""
    for call in calls:
        if says_causal(call, module_at(subject.module, call.site), config_at(subject.module, call.site)):
            return Message("laws.causal.declared")
    for owner in (subject.module, subject.config):
        if field(owner, "is_causal") is True or field(owner, "causal") is True:
            return Message("laws.causal.declared")
    # Keys of a cache are (B, H, n, E): positions are axis 2.
    keys = (x for name, x in outputs.items() if _CACHE_OUTPUT.search(name) and position_axis(x, batch, length) == 2)
    return None if next(keys, None) is None else Message("laws.causal.keys_cached")


def _ahead(subject: Subject, call: AttentionCall) -> bool:
    """Return whether something declares that rows see later keys."""
    owners = module_at(subject.module, call.site), config_at(subject.module, call.site)
    declared = may_see_ahead(owners, field(subject.module, "config"), call.mask)
    return declared is not None or lookahead(owners) > 0


def _language_model(subject: Subject, content: Content, outputs: Outputs) -> bool:
    """Return whether the model maps ids to logits over their vocabulary, and no config names its model type."""
    if not content.ids or (subject.config is not None and field(subject.config, "model_type") is not None):
        return False
    # Logits over ids have as many channels as an embedding has rows.
    rows = {part.num_embeddings for part in subject.module.modules() if isinstance(part, nn.Embedding)}
    heads = [x for x in outputs.values() if x.dim() == 3 and x.shape[:2] == content.tensor.shape]
    return any(head.shape[2] in rows for head in heads) and field(subject.config, "is_causal") is not False

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
from sqrtdk.laws.answers import broken, calls_at, kept, plural
from sqrtdk.laws.first_place import Protected, first_place
from sqrtdk.laws.inputs import DECODER, ENCODER, Content, contents, other
from sqrtdk.laws.moved import moved_positions, position_axes, position_axis
from sqrtdk.laws.subject import NotAsked, Outputs, Subject
from sqrtdk.tracing.records import AttentionCall

LAW = "causal"
SOURCE = "Vaswani et al. 2017, section 3.2.3: a position attends to those up to its own"
_CACHE = re.compile(r"past|cache|mems|present")
_FIX = "pass the causal mask to this attention"


def ask(subject: Subject) -> Iterator[LawAnswer]:
    """Yield one answer."""
    content = tokens_of_decoder(subject)
    batch, length = content.tensor.shape[:2]
    cut = length // 2
    later = (torch.arange(length) >= cut).expand(batch, length)
    changes = {content.name: other(subject, content, later)}
    if torch.equal(changes[content.name], content.tensor):
        raise NotAsked("its tokens can't be changed: all are special")
    before, after = subject.base, subject.run(changes)
    axes = position_axes(before, batch, length)
    axes = {name: axis for name, axis in axes.items() if name in after and after[name].shape == before[name].shape}
    if not axes:
        raise NotAsked("no output has a position for each token")
    rows = torch.stack([moved_positions(before[name], after[name], axis).cpu() for name, axis in axes.items()]).any(0)
    leaked = int(rows[:, :cut].any(0).sum())
    if not rows.any():
        raise NotAsked("no output moves with the tokens at all")
    owned = [call for call in calls_at(subject, None) if call.query_len == length and call.self_attention is not False]
    if not leaked:
        yield kept(LAW, content.name)
        return
    said = _said(subject, owned, before, batch, length)
    if said is None and not _language_model(subject, content, before):
        yield kept(LAW, content.name, "every position sees later ones, and nothing says otherwise")
        return
    if any(_ahead(subject, call) for call in owned):
        yield kept(LAW, content.name, "positions see later ones, as declared")
        return
    site = first_place(subject, {}, changes, Protected(~later))
    shown = rows[int(rows[:, :cut].sum(1).argmax())] & (torch.arange(length) < cut)
    if said is None:
        message = "ids in, logits over their vocabulary out, and every row sees later keys: is it meant to be causal?"
        fix = "pass a causal mask if it predicts the next token, or declare is_causal = False in the config"
        yield broken(LAW, content.name, "note", site, message, fix, SOURCE, value=float(leaked), positions=shown)
        return
    message = f"outputs of {plural(leaked, 'earlier position')} of {cut} move with later tokens, though {said}"
    yield broken(LAW, content.name, "critical", site, message, _FIX, SOURCE, value=float(leaked), positions=shown)


def tokens_of_decoder(subject: Subject) -> Content:
    """Return the tokens whose order counts: the decoder's, if there are two kinds.

    Raises:
        NotAsked: There are no tokens.
    """
    found = [content for content in contents(subject) if content.length is not None]
    decoder = [content for content in found if DECODER.search(content.name)]
    plain = [content for content in found if not ENCODER.search(content.name)]
    if not (decoder or plain):
        raise NotAsked("no input is a sequence of tokens or features")
    return (decoder or plain)[0]


def _said(subject: Subject, calls: list[AttentionCall], outputs: Outputs, batch: int, length: int) -> str | None:
    """Return what says that the model is causal, or None if nothing does."""
    for call in calls:
        if says_causal(call, module_at(subject.module, call.site), config_at(subject.module, call.site)):
            return "the model says that it is causal"
    for owner in (subject.module, subject.config):
        if field(owner, "is_causal") is True or field(owner, "causal") is True:
            return "the model says that it is causal"
    # Keys of a cache are (B, H, n, E): positions are axis 2.
    keys = (x for name, x in outputs.items() if _CACHE.search(name) and position_axis(x, batch, length) == 2)
    return None if next(keys, None) is None else "the keys of every position are cached"


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

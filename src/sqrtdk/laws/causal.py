"""Law `causal`: a later token moves no output of an earlier position.

Changed: the tokens from a cut on (the decoder's, if there are two kinds). Compared: the outputs with these positions,
before the cut. What padding sees does not matter, so positions that a mask hides are neither cuts nor compared.
There are two cuts, at neighbouring positions near the middle. Blocks of tokens that see themselves pass a cut at which
a block begins, but no block of two tokens or more begins at both. Not caught: what is seen on one side of both cuts
only, as within an image at the end of the tokens. Samples without padding have the same cuts. Each of several samples
then has one of them, and both cuts share a run. If that run moves an earlier position, each cut is tried by itself,
because samples may see one another.
A broken law is `critical` if module or config say that the model is causal, or if the model returns keys for a cache,
because cached keys are computed without later tokens. A model that maps ids to logits over their vocabulary and says
nothing gets a note. The law does not apply if later tokens move earlier outputs and nothing says that they must not, or
something declares a prefix, two directions or a lookahead. A causal mask in a model whose config says that attention is
bidirectional breaks the law `configured`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sqrtdk.audit.configs import field, module_at
from sqrtdk.audit.declared import config_at
from sqrtdk.audit.records import LawAnswer
from sqrtdk.audit.sight import declares_causal, lookahead, may_see_ahead
from sqrtdk.laws.answers import calls_inside, has_attention, law_broken, law_holds
from sqrtdk.laws.first_place import Protected, first_place
from sqrtdk.laws.inputs import DECODER, ENCODER, Content, content_of, contents, mask_inputs, other_content
from sqrtdk.laws.moved import moved_positions, position_axes, position_axis
from sqrtdk.laws.rows import runs_of
from sqrtdk.laws.subject import NotAsked, Outputs, Subject
from sqrtdk.laws.traced import run_traced
from sqrtdk.messages import Message
from sqrtdk.tracing.records import AttentionCall

LAW = "causal"
_CACHE_OUTPUT = re.compile(r"past|cache|mems|present")


def ask(subject: Subject) -> Iterator[LawAnswer]:
    """Yield one answer: whether other tokens from a position on leave the outputs before it as they are.

    A violation is "critical" if the model declares causal attention, and a note for a language model that does not.

    Raises:
        NotAsked: No output moves at all, nothing says that the model is causal, or it declares a lookahead.
    """
    content = tokens_of_decoder(subject)
    batch, length = content.tensor.shape[:2]
    run = _run(subject, content)
    if not run.moves:
        raise NotAsked(Message("laws.asking.nothing_moves"), by_length=True)
    subject.moves = True
    if not run.leaked.any():
        yield law_holds(LAW, content.name)
        return
    owned = [
        call for call in calls_inside(subject, None) if call.query_len == length and call.self_attention is not False
    ]
    why = _why_causal(subject, owned, subject.base, batch, length)
    if why is None and not _language_model(subject, content, subject.base):
        raise NotAsked(Message("laws.causal.undeclared"))
    if any(_ahead(subject, call) for call in owned):
        raise NotAsked(Message("laws.causal.declared_otherwise"))
    site = first_place(subject, {}, run.changes, Protected(run.protected))
    worst = int(run.leaked.sum(1).argmax())
    shown, count = run.leaked[worst], int(run.leaked[worst].sum())
    severity = "note" if why is None else "critical"
    if why is None:
        message, fix = Message("laws.causal.sees_later"), Message("laws.causal.fix_sees_later")
    else:
        cut = int(run.protected[worst].sum())
        message = Message("laws.causal.earlier_moves", count=count, cut=cut, why=why)
        fix = Message("laws.causal.fix" if has_attention(subject, site) else "laws.causal.fix_state")
    source = Message("laws.causal.source")
    yield law_broken(LAW, content.name, severity, site, message, fix, source, value=float(count), positions=shown)


@dataclass(frozen=True, slots=True, eq=False)
class _CutRun:
    """A run with other tokens from a cut of each sample on.

    Attributes:
        changes: The changed input.
        protected: Positions that must not move, (B, n).
        leaked: Those that moved, (B, n).
        moves: Whether any position moved.
    """

    changes: dict[str, Tensor]
    protected: Tensor
    leaked: Tensor
    moves: bool


def _run(subject: Subject, content: Content) -> _CutRun:
    """Return the first run in which an earlier position moves, or the last run if none does."""
    cuts = _cuts(subject, content)
    batch = len(cuts[0])
    if batch > 1 and all(bool((cut == cut[0]).all()) for cut in cuts):
        run = _of_cut(subject, content, torch.where(torch.arange(batch) % 2 == 0, *cuts))
        if not run.leaked.any():
            return run
    if subject.rows_apart:
        after = runs_of(subject, [_cut_off(subject, content, cut) for cut in cuts])
        both = [_of_cut(subject, content, *pair) for pair in zip(cuts, after, strict=True)]
        return next((run for run in both if run.leaked.any()), both[1])
    run = _of_cut(subject, content, cuts[0])
    return run if run.leaked.any() else _of_cut(subject, content, cuts[1])


def earlier_stay(subject: Subject) -> bool:
    """Return whether new tokens from the later cut position on, and another seed, change no output before it.

    The result is also kept in `subject.earlier_stay`. Outputs at padding are not compared. If an attention rotates q
    and k, the run is traced and kept in `subject.traced_cut`.
    """

    def traced_outputs(changes: dict[str, Tensor]) -> Outputs:
        run = subject.traced_cut = run_traced(subject, changes, seed=seed)
        return run.outputs

    content = tokens_of_decoder(subject)
    batch, length = content.tensor.shape[:2]
    cut = _cuts(subject, content)[1]
    changes, seed = _cut_off(subject, content, cut), subject.seed + 1
    rotated = any(call.rope for call in calls_inside(subject, None))
    before, after = subject.base, traced_outputs(changes) if rotated else subject.run(changes, seed=seed)
    first = int(cut.min())
    pairs = (
        (before[name].narrow(axis, 0, first), after[name].narrow(axis, 0, first), axis)
        for name, axis in position_axes(before, batch, length).items()
    )
    hidden = _padding(subject, content)[:, :first]
    moved = any(bool((moved_positions(one, other, axis).cpu() & ~hidden).any()) for one, other, axis in pairs)
    subject.earlier_stay = not moved
    return subject.earlier_stay


def _of_cut(subject: Subject, content: Content, cut: Tensor, after: Outputs | None = None) -> _CutRun:
    batch, length = content.tensor.shape[:2]
    changes = _cut_off(subject, content, cut)
    before = subject.base
    if after is None:
        after = subject.run(changes)
    found = [
        moved_positions(before[name], after[name], axis).cpu()
        for name, axis in position_axes(before, batch, length).items()
        if name in after and after[name].shape == before[name].shape
    ]
    if not found:
        raise NotAsked(Message("laws.asking.no_output_per_token"), by_length=True)
    rows = torch.stack(found).any(0)
    protected = (torch.arange(length) < cut[:, None]) & ~_padding(subject, content)
    return _CutRun(changes, protected, rows & protected, bool(rows.any()))


def _cut_off(subject: Subject, content: Content, cut: Tensor) -> dict[str, Tensor]:
    """Return the tokens with others from the cut of each sample on."""
    later = torch.arange(content.tensor.shape[1]) >= cut[:, None]
    return {content.name: other_content(subject, content, later)}


def _cuts(subject: Subject, content: Content) -> tuple[Tensor, Tensor]:
    """Return two cuts of each sample, (B,), near the middle of its tokens; n if no token of it can be changed.

    Special ids and the largest id are never changed, so a cut is a position whose token can be.

    Raises:
        NotAsked: No sample has a cut.
    """
    batch, length = content.tensor.shape[:2]
    other = other_content(subject, content, torch.ones(batch, length, dtype=torch.bool))
    visible = ~_padding(subject, content)
    changes = (other != content.tensor).reshape(batch, length, -1).any(2).cpu() & visible
    if bool(visible.all()) and (pair := _pair(changes.all(0), visible[0])) and pair[1] == pair[0] + 1:
        return torch.full((batch,), pair[0]), torch.full((batch,), pair[1])  # the same for all samples
    pairs = [_pair(*sample) or (length, length) for sample in zip(changes, visible, strict=True)]
    cuts = torch.tensor(pairs).T
    if bool((cuts == length).all()):
        raise NotAsked(Message("laws.causal.all_special"), by_length=True)
    return cuts[0], cuts[1]


def _pair(changes: Tensor, visible: Tensor) -> tuple[int, int] | None:
    """Return the nearest neighbours of the positions that can be changed, of these the pair nearest to the middle."""
    shown = visible.nonzero()[:, 0].tolist()
    places = [place for place in changes.nonzero()[:, 0].tolist() if place > shown[0]]
    pairs = zip(places, places[1:] or places, strict=False)
    middle = shown[len(shown) // 2] if shown else 0
    return min(pairs, key=lambda pair: (pair[1] - pair[0], abs(pair[0] - middle)), default=None)


def _padding(subject: Subject, content: Content) -> Tensor:
    """Return the positions of the content that a mask hides, (B, n)."""
    hidden = torch.zeros(content.tensor.shape[:2], dtype=torch.bool)
    for mask in mask_inputs(subject):
        if mask.hidden is not None and any(one.name == content.name for one in content_of(subject, mask)):
            hidden |= mask.hidden.cpu()
    return hidden


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
        if declares_causal(call, module_at(subject.module, call.site), config_at(subject.module, call.site)):
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
    rows |= field(subject.module, "vocabularies") or set()  # tables of a program of another framework
    heads = [x for x in outputs.values() if x.dim() == 3 and x.shape[:2] == content.tensor.shape]
    return any(head.shape[2] in rows for head in heads) and field(subject.config, "is_causal") is not False

"""Law `shift`: adding a constant to all positions moves no output, if positions are relative.

Changed: 7 is added to every position id; if the inputs have none, they count from 0 in one run and from 7 in the other.
Compared: all outputs. It catches a rotation of q alone, or one that is applied to q twice and to k once.
Not asked: if forward takes no position_ids, or no self-attention rotates q or k by them; if the hidden states before
the first attention move (learned or added positions); if q or k gets gains after the rotation that differ between
features; if the scale, or which keys a row sees, depends on positions; if positions restart.

Derivation of the bar: an angle is position * frequency, with frequencies up to 1. In float32 it is off by up to eps / 2
of the position, which moves q and k by the same share of their size, in each layer. So half a position is added to the
roundings of any two runs (`laws.moved`), and enlarged by layers up to 10 times, as those are.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sqrtdk.audit.first_tokens import in_a_band
from sqrtdk.audit.records import LawAnswer
from sqrtdk.laws.answers import law_broken, law_holds
from sqrtdk.laws.causal import tokens_of_decoder
from sqrtdk.laws.first_place import Protected, first_unlike, taken_by
from sqrtdk.laws.inputs import restarts
from sqrtdk.laws.moved import MOVED_ROUNDINGS, moved_entries
from sqrtdk.laws.padded import self_attentions
from sqrtdk.laws.subject import NotAsked, Subject
from sqrtdk.messages import Message
from sqrtdk.models.modules import forward_arguments
from sqrtdk.tracing.records import BY_ROW, FROM_DATA, AttentionCall
from sqrtdk.tracing.trace import trace

LAW = "shift"
SHIFT = 7
LAYER_ENLARGEMENT = 10.0  # by layers, see `laws.moved`
_POSITION_INPUTS = ("position_ids", "positions", "pos_ids", "pos")


def ask(subject: Subject) -> Iterator[LawAnswer]:
    """Yield one answer: whether rotary attention depends on differences of positions alone.

    All `position_ids` are increased by the same number; no output may change by more than rounding.

    Raises:
        NotAsked: No attention rotates q and k, one depends on absolute positions by design (norm after the rotation,
            scale per query, blocks), or positions change nothing.
    """
    named = subject.by_name()
    content = tokens_of_decoder(named)
    batch, length = content.tensor.shape[:2]
    name, positions = _positions(named, batch, length)
    calls = self_attentions(named, content)
    rotated = [call for call in calls if any(stage.name == "rope" for stage in call.stages)]
    if not rotated:
        raise NotAsked(Message("laws.shift.no_rotation"))
    if any(_normed_after(call, where) for call in rotated for where in ("q", "k")):
        raise NotAsked(Message("laws.shift.normalised_after"))
    if not all(map(in_a_band, calls)):
        raise NotAsked(Message("laws.shift.keys_of_position"))
    if any(factor.source in (BY_ROW, FROM_DATA) for call in rotated for factor in call.scale.factors):
        raise NotAsked(Message("laws.shift.scale_of_row"))
    one = named.over({**named.inputs, name: positions})
    other = named.over({**named.inputs, name: positions + SHIFT})
    roundings = MOVED_ROUNDINGS + LAYER_ENLARGEMENT * float(positions.max() + SHIFT) / 2
    unlike = [
        path
        for path, x in one.base.items()
        if path in other.base and bool(moved_entries(x, other.base[path], roundings).any()) and not _of_cache(path, x)
    ]
    if not unlike:
        # Stretched positions must move something, or the argument does nothing.
        apart = named.run({name: positions * 2})
        if not any(path in apart and bool(moved_entries(x, apart[path]).any()) for path, x in one.base.items()):
            raise NotAsked(Message("laws.asking.changes_nothing", name=name), by_length=True)
        yield law_holds(LAW, name)
        return
    before = [taken_by(run, calls[0].site, batch, length) for run in (one, other)]
    if before[0] is None or before[1] is None:
        raise NotAsked(Message("laws.shift.unknown_states"))
    if bool(moved_entries(before[0], before[1], roundings).any()):
        raise NotAsked(Message("laws.shift.added_positions"))
    everything = Protected(torch.ones(batch, length, dtype=torch.bool))
    site = first_unlike((one, everything), (other, everything), among={call.site for call in calls})
    message = Message("laws.shift.moves", shift=SHIFT)
    if turned := _turned(one, other, site):
        message = Message("laws.shift.moves_one", shift=SHIFT, which=Message(turned))
    fix, source = Message("laws.shift.fix"), Message("laws.shift.source")
    yield law_broken(LAW, name, "fail", site, message, fix, source, value=float(len(unlike)))


def _normed_after(call: AttentionCall, where: str) -> bool:
    """Return whether a norm with gains follows the rotation, as in HunYuan; the product then depends on positions."""
    names = [stage.name for stage in call.stages if stage.where == where]
    return call.norm_gain and "rope" in names and "norm" in names[names.index("rope") :]


def _positions(subject: Subject, batch: int, length: int) -> tuple[str, Tensor]:
    """Return the argument of positions, and its value."""
    for name in _POSITION_INPUTS:
        value = subject.tensors.get(name)
        if value is not None and not value.is_floating_point() and value.dim() and value.shape[-1] == length:
            if value.dim() == 2 and bool(restarts(value).any()):
                raise NotAsked(Message("laws.shift.restart"))
            return name, value
    if _POSITION_INPUTS[0] not in forward_arguments(subject.module) or _POSITION_INPUTS[0] in subject.inputs:
        raise NotAsked(Message("laws.shift.no_argument"))
    device = next(iter(subject.tensors.values())).device
    return _POSITION_INPUTS[0], torch.arange(length, device=device).repeat(batch, 1)


def _of_cache(path: str, output: Tensor) -> bool:
    """Return whether an output is cached keys, (B, H, n, E) by any name: these rightly move if they are rotated."""
    return output.dim() == 4 or any(word in path.split(".")[0] for word in ("past", "cache", "present"))


def _turned(one: Subject, other: Subject, site: str | None) -> str | None:
    """Return the message's id that says which of q and k moved with the positions; None if both or none did."""
    runs = []
    for subject in (one, other):
        with trace(subject.module, stats=False, numeric=False, keep=True) as traced:
            subject.run({})
        runs.append(next((tensors for tensors in traced.tensors if tensors.site == site), None))
    if runs[0] is None or runs[1] is None:
        return None
    q, k = (
        bool(moved_entries(getattr(runs[0], name).values, getattr(runs[1], name).values).any())
        for name in ("query", "key")
    )
    return {(True, False): "laws.shift.q_turns", (False, True): "laws.shift.k_turns"}.get((q, k))

"""Law `configured`: layers follow the config: the rotation of q and k, the window of a mask, and its direction.

Nothing is changed. One run with a trace gives q and k before and after the rotation of each layer, and a rotation is
fitted to them. Its frequencies are in radians per row. Over L rows they are known to 2^10 eps / (L - 1).
Compared: the rotated channels with `partial_rotary_factor`, `rotary_dim` and alike; the frequencies with those of
`rope_theta` and of the law that `rope_parameters` or `rope_scaling` names. A frequency counts as the config's if the
inputs are too short to tell them apart. Not asked: what the config does not state, a law that is not known, and rows
whose positions do not go up one by one, as those of images.
Window and direction of each layer are read from its mask (`declared_masks`), the factor on v and the gate on the output
from the numbers behind v (`declared_outputs`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from sqrtdk.audit.configs import module_at, number_at
from sqrtdk.audit.declared import config_at
from sqrtdk.audit.records import BROKEN, KEPT, NOT_ASKED, LawAnswer
from sqrtdk.audit.verdicts import layer_of
from sqrtdk.laws.answers import NO_VALUES, law_broken, law_holds, law_not_asked
from sqrtdk.laws.declared_masks import LAW, of_masks
from sqrtdk.laws.declared_outputs import of_gates
from sqrtdk.laws.moved import MOVED_ROUNDINGS
from sqrtdk.laws.rotations import DeclaredRotation, declared_rotation, number_text
from sqrtdk.laws.subject import NotAsked, Subject
from sqrtdk.laws.traced import traced
from sqrtdk.messages import Message
from sqrtdk.tracing.probe.rotation import RotationFit, fit_rotation
from sqrtdk.tracing.probe.tables import LOOSE_FREQUENCY_TOLERANCE, Law, frequencies, law_of
from sqrtdk.tracing.tensors import CallTensors, Vector

CHANNELS, FREQUENCIES = "laws.configured.about.channels", "laws.configured.about.frequencies"
CONFIGURED_SOURCE = "laws.configured.source"
LEAST_ROWS_TURNED = 3
STILL_NOISE = 8.0  # times the noise: a pair that should turn by more, and does not, stands still
POSITION_JUMP = 0.2  # radians by which a step is off if positions jump; in half precision it is off by less
FREQUENCY_ERROR = 0.01  # relative error of a frequency; tables in half precision are off by 0.4%
_CONFIGURED_FIX = "laws.configured.fix"


@dataclass(frozen=True, slots=True, eq=False)
class _Turning:
    """The rotation of q or k in one call.

    Attributes:
        call: The call.
        fit: The fitted rotation.
        steps: Radians from row to row, (R / 2,), not negative.
        noise: Radians per row by which a step may be off.
    """

    call: CallTensors
    fit: RotationFit
    steps: Tensor
    noise: float

    @property
    def law(self) -> Law | None:
        """The base of its steps and their common factor, or None if the steps follow no base."""
        return law_of(self.steps, self.fit.rotation.table.shape[1], LOOSE_FREQUENCY_TOLERANCE)


def ask(subject: Subject) -> Iterator[LawAnswer]:
    """Yield whether the run does what the config states about masks, output gates and rotary embeddings.

    For each field there are the broken answers, one for each distinct message, or else one answer.

    Raises:
        NotAsked: The config states nothing about these, or no attention rotates q and k.
    """
    answers = [*of_masks(subject)]
    turned: list[_Turning] = []
    with suppress(NotAsked) if answers else nullcontext():  # masks have answered without a run
        answers += of_gates(subject)
        if any(judged.call.rope or judged.call.unknown for judged in subject.calls):  # else there is nothing to fit
            run = subject.traced_cut or traced(subject)  # a rotation shows with any tokens
            turned += [turning for call in run.calls.values() for turning in _turnings(call)]
    for turning in turned:
        answers += _judged(subject, turning)
    if not answers:
        raise NotAsked(Message("laws.configured.nothing_stated" if turned else "laws.configured.no_rotation"))
    yield from by_field(answers)


def without_values(subject: Subject) -> Iterator[LawAnswer]:
    """Yield the answers from masks if there are no values, as on the meta device.

    Raises:
        NotAsked: No layer declares a window or a direction that its mask shows.
    """
    answers = [*of_masks(subject, static=True)]
    if not answers:
        raise NotAsked(Message(NO_VALUES))
    yield from by_field(answers)


def by_field(answers: list[LawAnswer]) -> Iterator[LawAnswer]:
    """Yield for each field one answer if it is kept, else its broken answers.

    Args:
        answers: Answers of all layers; `about` names the config field.

    Yields:
        The broken answers of a field, each message once at the first layer that has it. If there are none, one answer:
        kept if a layer shows that, else not asked.
    """
    for about in dict.fromkeys(answer.about for answer in answers):
        of_field = [answer for answer in answers if answer.about == about]
        found: dict[str, LawAnswer] = {}  # each message once, at the first layer that has it
        for answer in of_field:
            if answer.state == BROKEN:
                found.setdefault(answer.reason, answer)
        # One layer that shows the field is enough.
        order = [answer for state in (KEPT, NOT_ASKED) for answer in of_field if answer.state == state]
        yield from found.values() or order[:1]


def _turnings(call: CallTensors) -> Iterator[_Turning]:
    """Yield the rotations of q and k that can be fitted."""
    for vector in (call.query, call.key):
        for before, after in _rotated(vector):
            fit = fit_rotation(before, after) if before.shape[2] >= LEAST_ROWS_TURNED else None
            if fit is None:
                continue
            rows = fit.rotation.table.shape[1]
            # A step is the turn over all rows divided by their number, and so is its error.
            noise = MOVED_ROUNDINGS * torch.finfo(after.dtype).eps / (rows - 1)
            yield _Turning(call, fit, frequencies(fit.rotation.table).abs().cpu(), noise)


def _rotated(vector: Vector) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the values before and after each rotation."""
    before = vector.projected
    for step in vector.steps:
        if step.name == "rope" and step.values is not None and before is not None:
            yield before, step.values
        before = step.values


def _judged(subject: Subject, turning: _Turning) -> Iterator[LawAnswer]:
    site = turning.call.site
    module, config = module_at(subject.module, site), config_at(subject.module, site)
    if config is None:
        return
    numbers = [int(part) for part in site.split(".") if part.isdecimal()]
    layer = layer_of(module, numbers[-1] if numbers else 0)
    head_dim = turning.call.query.values.shape[-1]
    said = declared_rotation(config, module, layer, head_dim)
    if said.width is None and said.base is None:
        return
    if not _in_order(turning):
        yield law_not_asked(LAW, Message(FREQUENCIES), Message("laws.configured.jumps"))
        return
    yield from _channels(turning, said, head_dim)
    if said.base is not None:
        yield _frequencies(turning, said, head_dim, number_at(config, "max_position_embeddings"))


def _in_order(turning: _Turning) -> bool:
    """Return whether most rows are one position behind the next, so that each pair turns by its own step."""
    table = turning.fit.rotation.table.to(torch.complex128)
    turned = (table[:, 1:] * table[:, :-1].conj()).angle()
    off = turned - frequencies(table)
    off = off - 2 * torch.pi * (off / (2 * torch.pi)).round()  # equal up to whole turns
    return bool((off.abs() <= POSITION_JUMP).all(-1).double().mean() >= 0.5)


# -- channels ----------------------------------------------------------------------------------------------------------


def _channels(turning: _Turning, said: DeclaredRotation, head_dim: int) -> Iterator[LawAnswer]:
    if said.width is None:
        return
    width = turning.fit.rotation.width
    # An odd number of channels rotates one pair more: 5 channels make 3 pairs.
    if any(width == wanted + wanted % 2 for wanted in said.widths) or _would_not_show(turning, said, head_dim):
        yield law_holds(LAW, Message(CHANNELS))
        return
    still = _still(turning, None, said.scaled)
    field = str(said.width)
    message = Message("laws.configured.channels", width=width, dims=head_dim, field=field)
    if still:
        pairs = len(turning.steps) - still
        message = Message("laws.configured.pairs", pairs=pairs, apart=width // 2, dims=head_dim, field=field)
    site, fix, source = turning.call.site, Message(_CONFIGURED_FIX), Message(CONFIGURED_SOURCE)
    yield law_broken(
        LAW, Message(CHANNELS), "fail", site, message, fix, source, value=float(width), expected=float(min(said.widths))
    )


def _still(turning: _Turning, table: Tensor | None, scaled: bool) -> int:
    """Return the number of pairs that stand still although they should turn by far more than the noise.

    They should turn by the base of the other pairs, or else by `table`. Such pairs have positions of another axis, e.g.
    of columns within a row of an image, or are left out.
    """
    law = turning.law
    if law is not None and not (scaled and table is not None):
        table = law.frequencies(len(turning.steps))
    return 0 if table is None else int(((turning.steps <= turning.noise) & (table > STILL_NOISE * turning.noise)).sum())


def _would_not_show(turning: _Turning, said: DeclaredRotation, head_dim: int) -> bool:
    """Return whether the pairs that the config rotates, but that seem to stand still, turn too little to be seen."""
    width = turning.fit.rotation.width
    for wanted in said.widths:
        tables = said.tables(wanted, head_dim, turning.fit.rotation.table.shape[1], None) if wanted > width else None
        if tables and any(bool((table[width // 2 :] <= turning.noise).all()) for table in tables):
            return True
    return False


# -- frequencies -------------------------------------------------------------------------------------------------------


def _frequencies(turning: _Turning, said: DeclaredRotation, head_dim: int, longest: float | None) -> LawAnswer:
    width, length = turning.fit.rotation.width, turning.fit.rotation.table.shape[1]
    about = Message(FREQUENCIES)
    tables = said.tables(width, head_dim, length, longest)
    if not tables:
        return law_not_asked(LAW, about, Message("laws.configured.unknown_law", law=said.law))
    if any(_same(turning, table) for table in _and_of_widths(said, tables, width, head_dim, length, longest)):
        return law_holds(LAW, about)
    # Frequencies of one axis fall from pair to pair.
    if not bool((turning.steps[1:] <= turning.steps[:-1] + turning.noise).all()) or _still(
        turning, tables[0], said.scaled
    ):
        return law_not_asked(LAW, about, Message("laws.configured.several_axes"))
    if said.unknown is not None:
        return law_not_asked(LAW, about, Message("laws.configured.unknown_law", law=said.unknown))
    message = _message(turning, said, tables[0], width)
    return law_broken(
        LAW, about, "fail", turning.call.site, message, Message(_CONFIGURED_FIX), Message(CONFIGURED_SOURCE)
    )


def _and_of_widths(
    said: DeclaredRotation, tables: list[Tensor], width: int, head_dim: int, length: int, longest: float | None
) -> Iterator[Tensor]:
    """Yield the tables of the rotated channels, and of other widths, because a wrong width is not also a wrong base."""
    yield from tables
    # theta^(-2i/128), the table of a whole head cut to 64 channels, reads as the base sqrt(theta) over 64
    for other in {head_dim - head_dim % 2, *said.widths} - {width}:
        for table in said.tables(other, head_dim, length, longest) or ():
            if len(table) >= width // 2:
                yield table[: width // 2]


def _same(turning: _Turning, table: Tensor) -> bool:
    return len(table) == len(turning.steps) and bool(
        ((turning.steps - table).abs() <= FREQUENCY_ERROR * table + turning.noise).all()
    )


def _message(turning: _Turning, said: DeclaredRotation, table: Tensor, width: int) -> Message:
    """Return the message, which names the field that is wrong."""
    assert said.base is not None
    law, field = turning.law, str(said.base)
    if said.scaled:
        # If the plain frequencies of the base fit, the law was not applied.
        unscaled = DeclaredRotation(said.base, said.bases, None, (), "default", {}).tables(width, width, 1, None)
        if unscaled and any(_same(turning, one) for one in unscaled):
            return Message("laws.configured.unscaled", law=said.named_law)
    elif law is not None and abs(law.factor - 1) <= FREQUENCY_ERROR:
        return Message("laws.configured.base", base=number_text(law.base), field=field)
    elif law is not None:
        stretch = f"{law.factor:.4g}"
        return Message("laws.configured.stretched", base=number_text(law.base), stretch=stretch, field=field)
    # The pair that is off by most.
    pair = int(((turning.steps - table).abs() / (FREQUENCY_ERROR * table + turning.noise)).argmax())
    turns, wanted = f"{float(turning.steps[pair]):.4g}", f"{float(table[pair]):.4g}"
    if said.law == "default":
        return Message("laws.configured.pair", pair=pair, turns=turns, field=field, wanted=wanted)
    named = said.named_law
    return Message("laws.configured.pair_of_law", pair=pair, turns=turns, law=named, field=field, wanted=wanted)

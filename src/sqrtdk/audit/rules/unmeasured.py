"""Rule `unmeasured`: reports everything that could not be judged, so that none of it looks fine.

- A call whose scale could not be read: warn. Heads without dimensions have no scale to judge. Rotary tables that do
  not rotate are named as the reason.
- An additive score, which has no scale to judge: note.
- A distance score, whose coefficient depends on the unit of its distances: note.
- An attention that ran and could not be read at all, or was not found in a module that is one by its name: warn; note
  if it has no softmax by its name, and another attention at its site was judged.
- An attention that was asked for and does not run that way: warn.
- A call whose scale was read, but whose logits could not be measured although there are values: note.
- An attention that did not run with these inputs: note.
- A softmax over a product of activations whose weights were not seen to reach values, which may be one: note.
Each finding shows what was seen up to the step that was lost, with file and line as far as they are known.
Threshold: any. `--fail-on unmeasured` fails on each of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from torch import nn

from sqrtdk.audit.context import Context
from sqrtdk.audit.records import UNMEASURED, Finding
from sqrtdk.audit.sources import join_lines, of_loss
from sqrtdk.messages import Message
from sqrtdk.models.attentions import silent_attentions
from sqrtdk.tracing import Trace
from sqrtdk.tracing.records import DISTANCE_SCORES, NotMeasured

UNMEASURED_SOURCE = "sources.threshold.unmeasured"
_UNMEASURED_FIX = "rules.unmeasured.fix"
_NO_SCALE_FIX = "rules.unmeasured.fix_no_scale"
_ROTATION_COUNTS = {  # how often q and k are rotated
    (2, 1): "rules.unmeasured.q_rotated_twice",
    (1, 2): "rules.unmeasured.k_rotated_twice",
}


def silences(
    model: nn.Module, called: Collection[int], run: Trace
) -> tuple[tuple[NotMeasured, ...], tuple[NotMeasured, ...]]:
    """Return the attentions about which a trace says nothing, in two groups.

    Args:
        model: The model.
        called: The ids of the modules that ran, from `watch_modules`.
        run: The trace.

    Returns:
        Attentions that ran but could not be read or found; and attentions that did not run, with softmaxes that may or
        may not be attentions.
    """
    unused = [entry.site for entry in run.not_attention if entry.unused]
    accounted_for = [entry.site for entry in run.not_attention if not entry.unused]
    accounted_for += [call.site for call in run.calls] + [entry.site for entry in run.not_measured]
    silent = [
        _with_softmax(NotMeasured(path, Message(f"trace.silent.{code}"), code=code), run)
        for path, code in silent_attentions(model, called, accounted_for, unused)
    ]
    idle = [entry for entry in silent if entry.code == "idle"]
    unfound = [entry for entry in silent if entry.code == "unfound"]
    # The finding on an unfound module shows the softmax inside it already.
    inside_unfound = tuple(f"{entry.site}." for entry in unfound)
    doubtful = [
        NotMeasured(entry.site, entry.reason, entry.formula, entry.at)
        for entry in run.not_attention
        if entry.doubtful and not f"{entry.site}.".startswith(inside_unfound)
    ]
    return (*run.not_measured, *unfound), (*dict.fromkeys(doubtful), *idle)


def _with_softmax(silent: NotMeasured, run: Trace) -> NotMeasured:
    """Return the entry with the first softmax of a product of activations that was lost inside the module."""
    inside = (entry for entry in run.not_attention if f"{entry.site}.".startswith(f"{silent.site}."))
    lost = next((entry for entry in inside if entry.doubtful), None)
    return silent if lost is None else replace(silent, formula=lost.formula, at=lost.at)


def unmeasured(context: Context) -> Iterable[Finding]:
    """Yield one finding for each attention that could not be judged, and for each whose logits were not measured.

    Severity "warn" if a scale could not be judged or an attention was lost; else "note".
    """
    for judged in context.calls:
        call = judged.call
        if call.score == "additive":
            unseen = call.mask is None and call.stats is None
            message = Message("rules.unmeasured.additive_no_mask" if unseen else "rules.unmeasured.additive")
            yield _finding("note", call.site, message, _NO_SCALE_FIX, call.softmax_at, call.index)
        elif call.score in DISTANCE_SCORES and not call.unknown:
            message = Message("rules.unmeasured.distance", formula=call.formula)
            yield _finding("note", call.site, message, _NO_SCALE_FIX, call.softmax_at, call.index)
        elif judged.verdict == UNMEASURED and (call.head_dim > 0 or call.unknown):
            reason, fix = judged.reason or Message("rules.joined.no_reason"), _UNMEASURED_FIX
            if "skewed" in call.faults:
                reason, fix = Message("rules.unmeasured.not_rotated"), "rules.unmeasured.fix_not_rotated"
            turns = tuple(sum((stage.where, stage.name) == (x, "rope") for stage in call.stages) for x in "qk")
            if turns in _ROTATION_COUNTS:
                reason, fix = Message(_ROTATION_COUNTS[turns], reason=reason), "rules.unmeasured.fix_rotated_twice"
            text = _with_formula(Message("rules.unmeasured.scale", reason=reason), call.formula)
            yield _finding("warn", call.site, text, fix, of_loss(call), call.index)
        elif context.mode == "dynamic" and call.stats is None and call.head_dim > 0:
            why = call.stats_reason or Message("rules.joined.no_reason")
            message = Message("rules.unmeasured.logits", reason=why)
            fix = "rules.unmeasured.fix_ranks" if call.part_of_row else _UNMEASURED_FIX
            yield _finding("note", call.site, message, fix, call.softmax_at, call.index)
    judged_at = {judged.call.site for judged in context.calls if judged.verdict != UNMEASURED}
    for entry in _each_once(context.lost):
        severity = "note" if entry.without_softmax and entry.site in judged_at else "warn"
        yield _finding(severity, entry.site, _message(entry), _UNMEASURED_FIX, entry.at)
    for entry in _each_once(context.idle_or_doubtful):
        fix = "rules.unmeasured.fix_idle" if entry.code == "idle" else _UNMEASURED_FIX
        yield _finding("note", entry.site, _message(entry), fix, entry.at)


def not_read(entry: NotMeasured) -> Finding:
    """Return the warning that an attention of a graph was not read or not judged; `entry` names it and the reason."""
    return _finding("warn", entry.site, _message(entry), "rules.unmeasured.fix_graph", entry.at)


def not_run_finding(entry: NotMeasured) -> Finding:
    """Return the warning that the model does not run an attention implementation that was asked for."""
    return _finding("warn", entry.site, entry.reason, "rules.unmeasured.fix_implementation")


def _each_once(entries: Iterable[NotMeasured]) -> Iterator[NotMeasured]:
    """Merge entries with the same site and reason into one, with all formulas and places."""
    alike: dict[tuple[str, str], list[NotMeasured]] = {}
    for entry in entries:
        alike.setdefault((entry.site, entry.reason), []).append(entry)
    for group in alike.values():
        formulas, places = (entry.formula for entry in group), (entry.at for entry in group)
        yield replace(group[0], formula=join_lines(formulas, " and "), at=join_lines(places))


def _message(entry: NotMeasured) -> str:
    return _with_formula(entry.reason, entry.formula)


def _with_formula(text: str, formula: str | None) -> str:
    return Message("rules.joined.seen", text=text, formula=formula) if formula else text


def _finding(
    severity: str, site: str, message: str, fix: str, at: str | None = None, call: int | None = None
) -> Finding:
    source = Message(UNMEASURED_SOURCE)
    return Finding(UNMEASURED, severity, site, None, None, message, Message(fix), source, at, call)

"""Compares a model with a side that answers, and says why they differ."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from sqrtdk._environment import environment
from sqrtdk.answers.diagnose import Diagnosis, diagnose
from sqrtdk.answers.fixes import fix_of_edit
from sqrtdk.answers.judge import CONSISTENT, PROVEN, WITHIN
from sqrtdk.answers.lab import Edits
from sqrtdk.answers.opening import open_side, tokenizer_of
from sqrtdk.answers.prompts import PROMPTS, prompt_length, with_repeat
from sqrtdk.answers.records import AnsweredCause, AnswersReport, DifferenceCourse, EditResidue
from sqrtdk.answers.rows import Answers, Prompt
from sqrtdk.answers.sentences import sentences
from sqrtdk.answers.server import Server
from sqrtdk.answers.sides import Side
from sqrtdk.answers.where import course_of
from sqrtdk.compare.records import DIFF_FAIL_ON, SideInfo
from sqrtdk.errors import InvalidValueError, ModelError
from sqrtdk.messages import Message, joined
from sqrtdk.models.inputs import WINDOW_FIELDS, guess_inputs
from sqrtdk.models.load import resolve_model
from sqrtdk.models.options import LoadOptions
from sqrtdk.models.records import Inputs

MOST_TIES = 12  # that a report lists


def diff_answers(
    a: nn.Module | str,
    b: Side | str | Callable[[list[int]], Any],
    prompts: Sequence[Sequence[int]] | None = None,
    *,
    bos: int | None = None,
    options: LoadOptions | None = None,
    fail_on: str = "different",
    command: str = "",
) -> AnswersReport:
    """Find out why a side that answers gives other log-probabilities than a model.

    A is changed in the ways of a table of known mistakes, and run: the change with which it gives B's answers is the
    cause. It is proven only if what is left is rounding, and nothing else in the table explains the answers as well.

    Args:
        a: A causal language model: a module that takes token ids (B, L), or what `sqrtdk.check` takes.
        b: The side that answers, a function of token ids, or a name; see `sqrtdk.answers.opening.open_side`.
        prompts: Token ids to ask; None takes three, of a text if `a` has a tokenizer, as long as its windows need.
        bos: A's token for the beginning of a sequence, if B may add it; None takes that of A's config.
        options: How to load `a` from a name, with the text, the length and the seed of prompts.
        fail_on: What gives the exit code 1: "different", "unmeasured", "never".
        command: The user's command line.

    Raises:
        ModelError: A can't be loaded or run, or B gives no answers.
        InvalidValueError: B answers in another shape, or `fail_on` is unknown.

    Example:
        >>> from sqrtdk.models.load import resolve_model
        >>> unscaled = resolve_model("demo").module
        >>> for block in unscaled.blocks:
        ...     block.attention.variant = "demo:unscaled"
        >>> report = diff_answers("demo", lambda ids: unscaled(torch.tensor([ids])))
        >>> report.verdict, [(cause.name, cause.a, cause.b) for cause in report.causes]
        ('proven', [('scale', 0.125, 1.0)])
    """
    if fail_on not in DIFF_FAIL_ON:
        raise InvalidValueError(
            Message("answers.error.fail_on", names=joined(DIFF_FAIL_ON, "comma"), given=repr(fail_on))
        )
    options = options or LoadOptions()
    loaded_name, module, inputs, config, notes = _opened(a, options)
    if options.dtype is None:
        module, told = _without_rounding(module)
        notes = (*dict.fromkeys((*notes, *told)),)
    asked = [tuple(map(int, ids)) for ids in prompts] if prompts is not None else _prompts(inputs)
    if bos is None and isinstance(own := getattr(config, "bos_token_id", None), int):
        bos = own
    side = open_side(b)
    if isinstance(side, Server):
        side.tokenizer = side.tokenizer or tokenizer_of(a, options.revision)
        if prompts is None:
            asked = [*side.fitted(asked)]
    requests = side.planned(asked)
    with torch.no_grad():
        answers = side.ask(asked)
    if isinstance(side, Server):
        requests, notes = side.requests, (*notes, *side.notes)
    if not len(answers):
        raise ModelError(Message("answers.error.nothing", name=side.name))
    with torch.no_grad():
        found = diagnose(module, asked, answers, bos=bos)
    parameter = next(module.parameters(), None)
    dtype = str(parameter.dtype).removeprefix("torch.") if parameter is not None else ""
    fixes = _fixes(found, getattr(side, "kind", ""), config)
    report = _report(found, answers, asked, fixes)
    report = replace(
        report,
        a=SideInfo(loaded_name, "model", type(module).__name__, dtype=dtype, calls=found.watched),
        b=SideInfo(side.name, type(side).__name__.lower()),
        requests=requests,
        tokens=side.tokens if isinstance(side, Server) and side.tokens else report.tokens,
        seed=options.seed,
        command=command,
        environment=environment() | {"notes": [*notes]},
        fail_on=fail_on,
    )
    return replace(report, paragraphs=sentences(report, found.watched))


def _opened(a: nn.Module | str, options: LoadOptions) -> tuple[str, nn.Module, Inputs | None, Any, tuple[str, ...]]:
    """Return A's name, module, inputs of three rows, config and notes."""
    if isinstance(a, nn.Module):
        config = getattr(a, "config", None)
        try:
            length = options.seq_len or _length(config)
            inputs, notes = guess_inputs(a, batch=PROMPTS, seq_len=length, seed=options.seed)
        except (InvalidValueError, ModelError):
            return type(a).__name__, a, None, config, ()
        return type(a).__name__, a, inputs, config, notes
    wanted = replace(options, batch=PROMPTS, seq_len=options.seq_len or prompt_length([], None))
    loaded = resolve_model(str(a), wanted)
    better = replace(wanted, seq_len=options.seq_len or _length(loaded.config))
    half = _half_dtypes(loaded.module) if options.dtype is None else ""
    widened = (Message("answers.note.widened", dtypes=half),) if half else ()
    if half:
        # a checkpoint is read as float32 at once: widened afterwards, constants such as the factor on the embeddings
        # of Gemma (9.798, 9.8125 in bfloat16) would stay rounded
        better = replace(better, dtype="float32")
    if better != wanted:
        loaded = resolve_model(str(a), better)
    return str(a), loaded.module, loaded.inputs, loaded.config, (*loaded.notes, *widened)


def _without_rounding(module: nn.Module) -> tuple[nn.Module, tuple[str, ...]]:
    """Return A in float32, as a copy if it is stored in fewer bits, and a note on that.

    B is held against A without rounding, and how B rounds is tried: the rounding of A's own dtype would be left over.
    """
    half = _half_dtypes(module)
    if not half:
        return module, ()
    return copy.deepcopy(module).float(), (Message("answers.note.widened", dtypes=half),)


def _half_dtypes(module: nn.Module) -> str:
    """Return the dtypes of 16 bits of a module's parameters as a list; "" if it has none."""
    half = {parameter.dtype for parameter in module.parameters() if parameter.dtype in (torch.float16, torch.bfloat16)}
    return joined(sorted(str(dtype).removeprefix("torch.") for dtype in half), "comma") if half else ""


def _length(config: Any) -> int:
    """Return the length of prompts that a model's windows need, within its positions."""
    windows = [getattr(config, field, None) for field in WINDOW_FIELDS]
    most = getattr(config, "max_position_embeddings", None)
    return prompt_length([each for each in windows if isinstance(each, int)], most if isinstance(most, int) else None)


def _prompts(inputs: Inputs | None) -> list[Prompt]:
    """Return the rows of token ids of inputs; the last one with a passage that stands twice."""
    tensors = list(inputs.values()) if isinstance(inputs, dict) else list(inputs or ())
    named = inputs.get("input_ids") if isinstance(inputs, dict) else None
    ids = named if named is not None else next((each for each in tensors if _is_ids(each)), None)
    if ids is None:
        raise ModelError(Message("answers.error.no_ids"), hint=Message("answers.hint.prompts"))
    rows = [tuple(map(int, row)) for row in ids.tolist()]
    return [*rows[:-1], with_repeat(rows[-1])]


def _is_ids(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.dim() == 2 and not tensor.dtype.is_floating_point


def _fixes(found: Diagnosis, kind: str, config: Any) -> tuple[str, ...]:
    """Return what to change in B for each proven edit, "" where nothing is known."""
    if found.verdict.kind != PROVEN:
        return ("",) * len(found.best)
    return tuple(fix_of_edit(edit.what, edit.a, edit.b, kind=kind, config=config) for edit in found.best)


def _report(found: Diagnosis, answers: Answers, prompts: Sequence[Prompt], fixes: Sequence[str]) -> AnswersReport:
    """Return the report of a diagnosis, without what concerns the sides."""
    verdict, unedited = found.verdict, found.runs[0]
    named = verdict.kind in (PROVEN, CONSISTENT)
    best = found.runs[verdict.best] if named else unedited
    aligned = answers.moved(found.alignment.shift + found.alignment.bos)
    before, after = (course_of(aligned, run.squares, run.floor) for run in (unedited, best))
    return AnswersReport(
        a=SideInfo("", ""),
        b=SideInfo("", ""),
        verdict=verdict.kind,
        causes=_causes(found, fixes) if named else (),
        ties=tuple(_text(found.tried[number]) for number in verdict.ties if found.tried[number])[:MOST_TIES],
        difference=unedited.residue,
        residue=best.residue,
        floor=best.floor,
        explained=verdict.explained if named else 0.0,
        least=WITHIN * unedited.floor,
        hidden=tuple(edit.text for edit in found.hidden),
        rounding=found.rounding.name,
        roundings=tuple(kind.name for kind in found.alike),
        shift=found.alignment.shift,
        bos=found.alignment.bos,
        places=DifferenceCourse(before.ends, before.residues, after.residues, before.begins, before.grows),
        edits=_residues(found),
        prompts=len(prompts),
        tokens=sum(map(len, prompts)),
        requests=0,
        rows=len(answers),
        forwards=found.forwards,
    )


def _causes(found: Diagnosis, fixes: Sequence[str]) -> tuple[AnsweredCause, ...]:
    verdict, edits = found.verdict, found.best
    others = tuple(_text(found.tried[number]) for number in verdict.twins)
    causes = []
    for edit, fix in zip(edits, fixes, strict=True):
        numbers = [edit.b, *(found.tried[number][0].b for number in verdict.alike if len(found.tried[number]) == 1)]
        known = [float(number) for number in numbers if isinstance(number, float | int)]
        ranges = len(edits) == 1 and len(known) > 1
        low, high = (min(known), max(known)) if ranges else (None, None)
        alone = others if len(edits) == 1 else ()
        causes.append(AnsweredCause(edit.cause, edit.a, edit.b, edit.text, edit.fitted, low, high, alone, fix))
    return tuple(causes)


def _text(edits: Edits) -> str:
    return joined([edit.text for edit in edits], "side_by_side") if len(edits) > 1 else edits[0].text


def _residues(found: Diagnosis) -> tuple[EditResidue, ...]:
    """Return the sets of edits that ran, each part once with its nearest number, the nearest first."""
    rows = []
    for edits, run in zip(found.tried, found.runs, strict=True):
        names, texts = tuple(edit.cause for edit in edits), tuple(edit.text for edit in edits)
        rows.append(EditResidue(names, texts, run.residue, run.floor if run.whole else None, run.whole))
    return tuple(sorted(rows, key=lambda row: row.residue))

"""Runs a model once under a trace, judges every attention in it, and applies every rule.

The audit restores what it sets: training flags, hooks, devices, random state, and attributes. What a forward pass
changes by itself, a cache or a buffer that counts calls, changes from run to run here; `sqrtdk.models.unchanged` puts
it back when all runs are done.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from sqrtdk._progress import report_progress
from sqrtdk._wrappers import named_buffers, named_parameters
from sqrtdk.audit.attributes import Key
from sqrtdk.audit.context import Context, Rerun, TokenMasks, tokens_of
from sqrtdk.audit.first_tokens import first_inputs, same_keys
from sqrtdk.audit.guard import current, eval_mode, implementation, offers_choice, random_state
from sqrtdk.audit.own_module import refuse_empty
from sqrtdk.audit.proportional import watch_base_lengths
from sqrtdk.audit.records import (
    UNMEASURED,
    AttentionSplit,
    Finding,
    JudgedCall,
    LawAnswer,
    ModelInfo,
    SourceFile,
    with_calls_named,
    with_health,
)
from sqrtdk.audit.rules import RULES
from sqrtdk.audit.rules.scales import SCALE_RULES
from sqrtdk.audit.rules.unmeasured import silences
from sqrtdk.audit.rules.unused import watch_norms
from sqrtdk.audit.sources import declared_at, named_at, read_lines, source_files
from sqrtdk.audit.verdicts import judge_all
from sqrtdk.errors import INTERRUPTS, ModelError, SqrtdkError, kind_and_text
from sqrtdk.messages import Message
from sqrtdk.models.attentions import watch_modules
from sqrtdk.models.copies import copied
from sqrtdk.models.inputs import without_numbers
from sqrtdk.models.modules import frozen_hint
from sqrtdk.models.options import ATTN
from sqrtdk.models.records import Inputs, LoadedModel
from sqrtdk.models.run import call as forward
from sqrtdk.modules.structures import tensors_of, walk
from sqrtdk.tracing import Trace
from sqrtdk.tracing.records import AttentionCall, NotAttention, NotMeasured
from sqrtdk.tracing.tape.nonfinite import Origin, TensorOwner, find_origin


@dataclasses.dataclass(frozen=True, slots=True)
class ModelRun:
    """The result of one run of the model."""

    attn: str  # "eager" or "sdpa" if it was chosen, else "own"
    model: ModelInfo
    mode: str
    environment: dict[str, Any]
    calls: tuple[JudgedCall, ...]
    not_attention: tuple[NotAttention, ...]
    not_measured: tuple[NotMeasured, ...]
    findings: tuple[Finding, ...]
    sources: tuple[SourceFile, ...] = ()
    laws: tuple[LawAnswer, ...] = ()
    # Floating-point tensors that the run returned, by name, if they were asked for.
    outputs: dict[str, Tensor] = dataclasses.field(default_factory=dict, repr=False, compare=False)
    returned: Any = dataclasses.field(default=None, repr=False, compare=False)  # what holds them
    seconds: float = dataclasses.field(default=0.0, repr=False, compare=False)  # of its forward, under the trace
    ranks: int = 1  # ranks that run the model together: its forward has collectives
    splits: tuple[AttentionSplit, ...] = ()  # how each call is split, if they were put together with other ranks'


@dataclasses.dataclass(frozen=True, slots=True)
class WholeCalls:
    """The attentions of this rank, each as one of all its ranks.

    Attributes:
        calls: The records, in the order in which they ran here.
        splits: How each of them is split, in the same order.
        not_measured: What could not be put together.
        in_blocks: Sites whose rows meet several blocks of keys. The weights of the blocks, e^(lse_b - lse), are a
            softmax of sums of q . k that may be an attention to the trace, and is none.
    """

    calls: tuple[AttentionCall, ...]
    splits: tuple[AttentionSplit, ...]
    not_measured: tuple[NotMeasured, ...]
    in_blocks: frozenset[str] = frozenset()


# Puts the attentions of a trace together with those of other ranks, from the inputs of this one; None leaves them.
Whole = Callable[[Trace, Inputs], WholeCalls | None]


def run_model(
    loaded: LoadedModel, attn: str, *, seed: int, compare: str, keep: bool = False, silent: bool = False,
    whole: Whole | None = None,
) -> ModelRun:  # fmt: skip
    """Run a model under a trace, judge its attention calls and apply the rules.

    Args:
        loaded: The model with its inputs.
        attn: "eager" or "sdpa"; any other value leaves the choice to the model.
        seed: Seed that is set before every forward pass.
        compare: When to run eager against sdpa: "auto", "always" or "never", see `Context`.
        keep: Whether to keep the model's floating-point outputs in the result.
        silent: Whether a run without attention is a result, not an error: graphs of embeddings and vocoders have none.
        whole: Puts the attentions together with those of other ranks, before they are judged; None: there are none.

    Raises:
        ModelError: The forward raises, no attention runs in it, or the inputs have no row or no token.
        UnsupportedError: The model can't be switched to `attn`.
    """
    module = loaded.module
    static = without_numbers(module, loaded.inputs)
    tokens = tokens_of(module, loaded.inputs)
    with ExitStack() as stack:
        stack.enter_context(random_state(module))
        stack.enter_context(eval_mode(module))
        if attn in ATTN and offers_choice(module):
            stack.enter_context(implementation(module, attn))
        environment = _environment(loaded)
        report_progress(Message("progress.running"))
        start = time.monotonic()
        with watch_norms(module) as ran, watch_base_lengths(module) as bases, watch_modules() as called:
            keeps = whole is not None and not static
            traced, output = _traced(loaded, seed, stats=not static, tokens=tokens, keep=keeps)
        seconds = time.monotonic() - start
        joined = whole(traced, loaded.inputs) if whole is not None and keeps else None
        if joined is not None:
            traced.calls = joined.calls
            traced.not_attention = tuple(
                entry for entry in traced.not_attention if not (entry.doubtful and entry.site in joined.in_blocks)
            )
        if not silent:
            _refuse_silence(loaded, traced)
        spoiled, infinite = _spoiled(output)
        outputs = tensors_of(output) if keep and not static else {}
        lost, idle_or_doubtful = silences(module, called, traced)
        rerun = _reruns(loaded, loaded.inputs, seed)
        # What one rank finds would decide how often it runs, and the others would wait in a collective.
        alone = traced.ranks == 1
        again = alone and not static
        if not alone:
            environment["notes"].append(Message("premises.ranks.once", count=traced.ranks))
        report_progress(Message("progress.judging"))
        judged = judge_all(traced.calls, module, bases)
        context = Context(
            model=module,
            calls=judged,
            mode="static" if static else "dynamic",
            rerun=rerun if again else None,
            rerun_first=_first_reruns(loaded, judged, seed) if again and not traced.not_measured else None,
            ran=frozenset(ran),
            compare=compare,
            dtype=str(environment["dtype"]),
            lost=lost,
            idle_or_doubtful=idle_or_doubtful,
            unread=traced.unread,
            tokens=tokens,
            spoiled=spoiled,
            infinite=infinite,
            origin=(lambda: _origin(loaded, seed)) if again else None,
        )
        entries: list[Finding | NotMeasured] = []
        for done, rule in enumerate(RULES.values()):
            report_progress(Message("progress.rules"), done, len(RULES))
            entries += rule(context)
        told = (entry for entry in entries if isinstance(entry, Finding))
        findings = with_calls_named(told, (judged.site for judged in context.calls))
    missed = (
        *lost,
        *(entry for entry in idle_or_doubtful if entry.code == "idle"),
        *(entry for entry in entries if isinstance(entry, NotMeasured)),
        *(joined.not_measured if joined is not None else ()),
    )
    lines = read_lines(loaded.home)
    judged_calls = tuple(
        dataclasses.replace(entry, declared_at=declared_at(entry, loaded.home, lines))
        for entry in with_health(judged, findings)
    )
    parameters = sum(p.numel() for p in module.parameters())
    return ModelRun(
        attn=attn,
        model=ModelInfo(loaded.id, type(module).__name__, parameters, named_at(loaded)),
        mode=context.mode,
        environment=environment,
        calls=judged_calls,
        not_attention=traced.not_attention,
        not_measured=missed,
        findings=findings,
        sources=source_files(loaded, judged_calls, findings, (*traced.not_attention, *missed)),
        outputs=outputs,
        returned=output if outputs else None,
        seconds=seconds,
        ranks=traced.ranks,
        splits=joined.splits if joined is not None else (),
    )


def without_verdicts(
    run: ModelRun, reasons: Mapping[Key, str], finding_of: Callable[[JudgedCall], Finding]
) -> ModelRun:
    """Return a run without the verdicts on the scales of some calls.

    Args:
        run: The run.
        reasons: For each such call, by (site, index), why it is not judged. The call becomes "unmeasured" with this
            reason, and its health "warn".
        finding_of: Makes the finding that replaces those on the call's scale, from the call after the change. Equal
            findings are kept once.
    """

    def without(judged: JudgedCall) -> JudgedCall:
        reason = reasons.get(judged.key)
        if reason is None:
            return judged
        unjudged = dataclasses.replace(judged, verdict=UNMEASURED, mistake=None, declared_by=None)
        return dataclasses.replace(unjudged, reason=reason, health="warn")

    calls = tuple(map(without, run.calls))
    kept = (entry for entry in run.findings if not (entry.rule in SCALE_RULES and (entry.site, entry.call) in reasons))
    said = (finding_of(judged) for judged in calls if judged.key in reasons)
    return dataclasses.replace(run, calls=calls, findings=(*kept, *dict.fromkeys(said)))


def with_laws(run: ModelRun, answers: tuple[LawAnswer, ...]) -> ModelRun:
    """Return the run with the answers of the laws (`sqrtdk.laws`), and without the outputs that were kept for them.

    The finding of each broken law joins `findings`, and the health of every call is decided anew.
    """
    findings = (*run.findings, *(answer.finding for answer in answers if answer.finding is not None))
    calls = with_health(run.calls, findings)
    return dataclasses.replace(run, laws=answers, findings=findings, calls=calls, outputs={}, returned=None)


def _traced(loaded: LoadedModel, seed: int, *, stats: bool, tokens: TokenMasks, keep: bool) -> tuple[Trace, Any]:
    torch.manual_seed(seed)
    with Trace(loaded.module, stats=stats, tokens=tokens.of, values=loaded.masks, keep=keep) as run:
        try:
            output = forward(loaded.module, loaded.inputs)
        except ModelError:
            refuse_empty(loaded.inputs)
            raise
    return run, output


def _origin(loaded: LoadedModel, seed: int) -> Origin | None:
    """Return where the first number of a run that is not finite comes from, or None.

    Raises:
        ModelError: This run raises, though the first did not.
    """
    entering = copied(loaded.inputs)
    inputs = entering.items() if isinstance(entering, dict) else enumerate(entering)
    held = {TensorOwner("input", str(name)): value for name, value in inputs if isinstance(value, Tensor)}
    held |= {TensorOwner("buffer", name): buffer for name, buffer in named_buffers(loaded.module)}
    held |= {TensorOwner("parameter", name): parameter for name, parameter in named_parameters(loaded.module)}

    def run() -> list[Tensor]:
        torch.manual_seed(seed)
        return [tensor for _, tensor in walk(forward(loaded.module, entering, own_inputs=True))]

    try:
        return find_origin(loaded.module, run, held)
    except (*INTERRUPTS, SqrtdkError):
        raise
    except Exception as error:  # from a torch mode, or from a tensor subclass
        raise ModelError(f"the search for the first such number raised {kind_and_text(error, 200)}") from error


def _refuse_silence(loaded: LoadedModel, run: Trace) -> None:
    """Raise if the run had no row or token, or if no attention was read."""
    if not any(call.batch and call.query_len and call.key_len for call in run.calls):
        refuse_empty(loaded.inputs)
    if run.calls:
        return
    reasons = [_with_place(entry) for entry in run.not_measured] + [_with_place(entry) for entry in run.not_attention]
    what = "no attention could be read" if run.not_measured else "no attention ran"
    raise ModelError(
        f"{what} in {loaded.id}" + (f": {reasons[0]}" if reasons else ""),
        hint=frozen_hint(loaded.module)
        or "Give a model with softmax(q . k) v in its forward, run without torch.compile, "
        "in the thread that calls forward: other threads are not seen.",
    )


def _with_place(entry: NotMeasured | NotAttention) -> str:
    seen = filter(None, (entry.formula, entry.at and f"at {entry.at}"))
    return ", ".join((entry.reason, *seen))


def _reruns(loaded: LoadedModel, inputs: Inputs, seed: int) -> Callable[[Mapping[Key, float] | None], Rerun]:
    """Return the function that runs the module once more, for `Context`."""

    def rerun(enlarge: Mapping[Key, float] | None) -> Rerun:
        torch.manual_seed(seed)
        with Trace(loaded.module, stats=False, enlarge=enlarge, formulas=False) as again:
            output = forward(loaded.module, inputs)
        # Caches are not walked: the model's answer is compared.
        tensors = tuple(tensor.detach() for _, tensor in walk(output, objects=False) if _has_numbers(tensor))
        return Rerun(again.calls, tensors, len(again.not_measured))

    return rerun


def _first_reruns(
    loaded: LoadedModel, judged: Sequence[JudgedCall], seed: int
) -> Callable[[Mapping[Key, float] | None], Rerun] | None:
    """Return the function that runs the module once more with the first tokens of its inputs, for `Context`, or None.

    It raises a `ModelError` if the attentions are others, or a row does not see what it sees in the whole inputs.
    """
    first = first_inputs(loaded, [one.call for one in judged])
    if first is None:
        return None
    inputs, fewer, length = first
    rerun = _reruns(loaded, inputs, seed)

    def rerun_first(enlarge: Mapping[Key, float] | None) -> Rerun:
        again = rerun(enlarge)
        calls = {(call.site, call.index): call for call in again.calls}
        if len(calls) != len(judged) or again.missed:
            raise ModelError("the first tokens run through other attentions")
        if not all(one.key in calls and same_keys(one.call, calls[one.key], length, fewer) for one in judged):
            raise ModelError("the first tokens do not see what all of them see")
        return again

    return rerun_first


def _spoiled(output: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of outputs that hold NaN or plus infinity, and of those among them without a NaN.

    Minus infinity does not count: it is the usual way to rule out a class or a token.
    """
    spoiled, infinite = [], []
    for name, tensor in walk(output):
        if not _has_numbers(tensor):
            continue
        with contextlib.suppress(Exception):  # a kind of tensor that lacks the operation
            nan, above = bool(tensor.isnan().any()), bool(tensor.isposinf().any())
            spoiled += [name] if nan or above else []
            infinite += [name] if above and not nan else []
    return tuple(spoiled), tuple(infinite)


def _has_numbers(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and not tensor.is_meta


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _environment(loaded: LoadedModel) -> dict[str, Any]:
    first = next((p for p in loaded.module.parameters() if p.is_floating_point()), None)
    return {
        "sqrtdk": _version("sqrtdk"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "platform": platform.platform(),
        "device": str(first.device) if first is not None else "cpu",
        "dtype": str(first.dtype).removeprefix("torch.") if first is not None else "",
        "attn": current(loaded.module),
        "notes": list(loaded.notes),
    }

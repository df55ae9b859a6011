"""`ask`: asks laws of one model, without the rest of a check."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn

from sqrtdk._progress import progress_shown
from sqrtdk._shown import Guessed
from sqrtdk._wrappers import hint_for, is_no_factory
from sqrtdk.audit.model_run import ModelRun, run_model
from sqrtdk.audit.own_module import as_inputs, from_module
from sqrtdk.audit.records import BROKEN, KEPT, NOT_ASKED, Finding, LawAnswer, ModelInfo, without_call
from sqrtdk.audit.sources import named_at
from sqrtdk.errors import InvalidTypeError, InvalidValueError, ModelError
from sqrtdk.laws.answers import state_of
from sqrtdk.laws.ranks import LAW, answers_of_ranks, factory_name
from sqrtdk.laws.table import LAWS, answers_of, are_named, check_seconds, names_of
from sqrtdk.models.factory import call_factory
from sqrtdk.models.limits import check_seed
from sqrtdk.models.load import resolve_model
from sqrtdk.models.names import ggml_kind, graph_kind
from sqrtdk.models.options import LoadOptions
from sqrtdk.models.records import Inputs, LoadedModel
from sqrtdk.models.run import by_default_of
from sqrtdk.models.unchanged import unchanged
from sqrtdk.ranks.group import world


@dataclass(frozen=True, slots=True)
class LawReport(Guessed):
    """The answers of laws about one model.

    Attributes:
        model: The model that was asked.
        answers: In the order of `LAWS`; a law that changes several inputs in turn has an answer for each.
        notes: What the runs changed of the model and could not be put back.
    """

    model: ModelInfo
    answers: tuple[LawAnswer, ...]
    notes: tuple[str, ...] = ()

    @property
    def broken(self) -> tuple[LawAnswer, ...]:
        """The answers whose state is "broken", in the order of `answers`; empty if no law is violated."""
        return tuple(answer for answer in self.answers if answer.state == BROKEN)

    @property
    def ok(self) -> bool:
        """Whether laws were asked and none is broken; False if none could be asked."""
        states = {answer.state for answer in self.answers}
        return KEPT in states and BROKEN not in states

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings of the broken answers, in their order: where and how severely a law is violated, and the fix."""
        return tuple(answer.finding for answer in self.broken if answer.finding is not None)

    def __repr__(self) -> str:
        laws = dict.fromkeys(answer.law for answer in self.answers)
        states = {law: state_of(answer for answer in self.answers if answer.law == law) for law in laws}
        failed = [law for law in laws if states[law] == BROKEN]
        told = [f"broken: {', '.join(failed)}"] if failed else []
        told += [f"{count} {state}" for state in (KEPT, NOT_ASKED) if (count := list(states.values()).count(state))]
        return f"LawReport({self.model.cls}; {'; '.join(told) or 'no law was asked'})"


def ask(
    model: nn.Module | str | Callable[[], Any], inputs: Any = None, laws: str | Sequence[str] = "all", seed: int = 0, *,
    seconds: float | None = None,
) -> LawReport:  # fmt: skip
    """Ask laws of a model: change one thing, and look at what moves.

    Let f be the model, x its inputs, and x' inputs that differ from x in one part. A law states for which outputs i
    |f(x')_i - f(x)_i| <= 2^11 eps s_i must hold, where s_i is the size of the numbers in the row and the channel of
    f(x)_i. For `causal`, x' has other tokens from the middle on, and i are the positions before the middle. eps is that
    of the outputs' dtype, but at least float32's.

    The model runs 8 to 30 times, in evaluation mode but for the laws `modes` and `gradient`. If its inputs are made
    here, most runs take their first 16 tokens: a law is kept by these if the model does the same with fewer tokens. The
    model is left as it was: weights, buffers, attributes, gradients, random state and inputs. What can't be put back is
    named in `notes`.

    Args:
        model: A module, or a name that `sqrtdk check` takes; an exported graph (.onnx, .pt2) needs inputs. Or a
            factory, a function that returns the module, or the module and its inputs: the law `ranks` builds the model
            once more with it.
        inputs: A dict or tuple for forward, or one tensor; None makes inputs from the config.
        laws: "all", or names of laws, in a sequence or joined by commas. Of a large model (over 2e9 parameters) "all"
            asks those that cost one run; named laws are asked whatever they cost, and `gradient` then of the whole
            inputs.
        seed: Seed of every run, and of the values that replace tokens and features.
        seconds: Seconds that all laws together may take; None: any number. No run begins that would end later, if it
            takes as long as the run before it; what is left is not asked. Of the law `ranks`: that the model on one
            process may take for each step, at most and by default 300 s.

    Returns:
        The answers. A law that does not apply or can't be asked gives the reason.

    Raises:
        InvalidValueError: There is no such law, `seconds` is not positive, or no inputs are given and no config has
            what they are made from.
        InvalidTypeError: `model` or `inputs` has another type.
        ModelError: The model can't be built, its forward raises, or no attention runs in it.

    Example:
        >>> import torch
        >>> class Attention(torch.nn.Module):
        ...     is_causal = True
        ...     def forward(self, q, k, v):
        ...         return torch.nn.functional.scaled_dot_product_attention(q, k, v)
        >>> class Decoder(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.qkv, self.attention = torch.nn.Linear(16, 48), Attention()
        ...     def forward(self, x):
        ...         q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        ...         return self.attention(q, k, v).transpose(1, 2).flatten(2)
        >>> report = ask(Decoder(), torch.randn(2, 8, 16), laws="causal")
        >>> report
        LawReport(Decoder; broken: causal)
        >>> report.broken[0].site, report.findings[0].severity
        ('attention', 'critical')
    """
    names = names_of(laws)
    check_seed(seed)
    check_seconds(seconds)
    with _errors_shared(names):
        loaded = _loaded(model, inputs, seed)
    if names == (LAW,) and (group := world()) is not None:  # an audit's run would need an attention on every rank
        count = sum(parameter.numel() for parameter in loaded.module.parameters())
        about = ModelInfo(loaded.id, type(loaded.module).__name__, count, named_at(loaded))
        return LawReport(about, tuple(answers_of_ranks(group, loaded, seed, seconds=seconds)))
    with unchanged(model, inputs) as before, by_default_of(loaded.module), progress_shown("laws"):
        # What the audit's run returned is not run again where a law can take it.
        run = run_model(loaded, "own", seed=seed, compare="never", keep=bool(names))
        answers = answers_of(loaded, run, names, seed, named=are_named(laws), seconds=seconds)
    return LawReport(run.model, tuple(_with_finding(answer, run) for answer in answers), before.stayed)


def _loaded(model: nn.Module | str | Callable[[], Any], inputs: Any, seed: int) -> LoadedModel:
    """Return the model with its inputs; `ask` describes the arguments and errors."""
    options = LoadOptions(seed=seed)
    own: Inputs | None = None if inputs is None else as_inputs(inputs)
    if isinstance(model, str) and graph_kind(model) is not None and ggml_kind(model) is None:
        return _of_graph(model, own)
    if isinstance(model, nn.Module):
        return from_module(model, own, options)
    if isinstance(model, str):
        return resolve_model(model, options, own)
    if callable(model) and not isinstance(model, type) and not is_no_factory(model):
        module, made = call_factory(model, seed=seed)
        loaded = from_module(module, made if own is None else own, options)
        name = factory_name(model)
        return loaded if name is None else dataclasses.replace(loaded, id=name, kind="factory")
    raise InvalidTypeError(
        f"model is a {type(model).__name__}", hint=hint_for(model, "Give a torch.nn.Module or a name.")
    )


def _of_graph(path: str, inputs: Inputs | None) -> LoadedModel:
    """Return an exported graph as a module with its inputs; an ONNX graph gives what onnxruntime gives."""
    if inputs is None:
        raise InvalidValueError(
            "an exported graph is asked laws on inputs of its own, and got none",
            hint="Give inputs by the names that the graph takes.",
        )
    if graph_kind(path) == ".pt2":
        from sqrtdk.graphs.program import read_exported  # readers of formats that most runs do not need

        return read_exported(path, inputs, trust_remote_code=False)
    from sqrtdk.graphs.onnx import open_onnx

    opened = open_onnx(path, inputs)
    if opened.off is not None:
        raise ModelError(opened.off, hint="Ask the model that was exported.")
    return opened.loaded


def _errors_shared(names: Sequence[str]) -> AbstractContextManager[None]:
    """Return a context whose error reaches all ranks, if these ask the law of them."""
    group = world() if LAW in names else None
    if group is None:
        return nullcontext()
    group.together = True  # the law is asked by name, so every rank is here
    return group.shared_errors()


def _with_finding(answer: LawAnswer, run: ModelRun) -> LawAnswer:
    """Return the answer with the finding of the rule that says where and why the law is broken, if there is one."""
    if answer.state != BROKEN or answer.finding is not None:
        return answer
    found = [one for one in run.findings if one.rule in LAWS[answer.law].found_by]
    # An answer that repeats a rule's words names its site. `finite` has none: the rule's first finding is the cause,
    # and what it reaches comes behind.
    if answer.site:
        same = answer.site, without_call(answer.reason)
        found = [one for one in found if (one.site, without_call(one.message)) == same]
    finding = next(iter(found), None)
    return dataclasses.replace(answer, finding=finding, site=finding.site if finding is not None else "")

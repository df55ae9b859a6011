"""Traces and judges every attention that runs inside one test, without knowing the model beforehand.

A module is named by its class when the test first calls it: "Decoder.layers.0.attn". Attention outside any module has
the site "". Its scale is the test's own choice, so a scale that is not a known mistake is a note only. The model can't
be run again within the test, so checks that need a second run (does a scale follow its attribute, eager against sdpa)
are left to `assert_attention`. Padding is not judged either.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
from torch import nn

from sqrtdk._wrappers import named_modules
from sqrtdk.audit.context import Context
from sqrtdk.audit.mistakes import UNKNOWN_MISTAKE
from sqrtdk.audit.records import UNMEASURED, Finding, JudgedCall, with_health
from sqrtdk.audit.rules import RULES
from sqrtdk.audit.rules.unmeasured import silences
from sqrtdk.audit.verdicts import judge_all
from sqrtdk.errors import kind_and_text
from sqrtdk.messages import Message, joined
from sqrtdk.models.attentions import watch_modules
from sqrtdk.testing.weak import OpenMasks, cannot_fail
from sqrtdk.tracing.tape.places import Sites
from sqrtdk.tracing.trace import Trace


class CalledModules(nn.Module):
    """The modules that a test called, as children of one root, so that each has a path and its config is found."""


@dataclass(frozen=True, slots=True)
class AuditedTest:
    """The audit of what ran inside a test.

    Attributes:
        calls: every attention, judged.
        findings: findings on the calls.
        weak: reasons why the test could not have failed; empty if it could.
    """

    calls: tuple[JudgedCall, ...]
    findings: tuple[Finding, ...]
    weak: tuple[str, ...]


class Observation:
    """A context manager that traces a test; `audit()` judges the trace afterwards. It changes no number.

    Example:
        >>> layer, x = nn.MultiheadAttention(32, 4, batch_first=True), torch.randn(1, 6, 32)
        >>> with Observation() as observation:
        ...     _ = layer(x, x, x)
        >>> audit = observation.audit()
        >>> audit.calls[0].call.site, audit.weak
        ('MultiheadAttention', ('scale 0.3536 = 1/sqrt(8), the default: a scale that is dropped passes',))
    """

    def __init__(self) -> None:
        self._sites = Sites(None)
        self._called = CalledModules().eval()
        self._masks = OpenMasks()
        self._trace = Trace(None, sites=self._sites, projections=True)
        self._ran: set[int] = set()
        self._open = ExitStack()

    def __enter__(self) -> Observation:
        with ExitStack() as stack:
            stack.enter_context(self._sites)
            self._ran = stack.enter_context(watch_modules())
            stack.enter_context(self._trace)
            stack.enter_context(self._masks)  # entered last, so that it does not see the trace's own operations
            forget = self._sites.entering  # the hook that is set already is called after ours

            def entering(module: nn.Module, args: tuple[Any, ...]) -> None:
                self._learn(module)
                if forget is not None:
                    forget(module, args)

            self._sites.entering = entering
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, traceback)

    def _learn(self, module: nn.Module) -> None:
        """Name a module and its submodules before it runs. A module that has a name keeps it."""
        if module.training:
            self._called.train()  # the test trains: dropout is not a finding then
        # The first call decides, so that a layer that a test calls on its own and within its model has one name.
        if id(module) in self._sites.names:
            return
        name = type(module).__name__
        alike = sum(type(other) is type(module) for other in self._called._modules.values())
        root = f"{name}{alike + 1}" if alike else name  # the second Decoder of a test is "Decoder2"
        self._called._modules[root] = module
        for path, part in named_modules(module):
            if id(part) not in self._sites.names:
                self._sites.learn(f"{root}.{path}" if path else root, part)

    def audit(self) -> AuditedTest:
        """Return the verdicts and findings for the attentions that ran in the test.

        If the audit raises, that becomes a finding, because a test that could not be judged must not look fine.
        """
        run = self._trace
        try:
            with torch.no_grad():
                calls, findings = self._judged()
            return AuditedTest(calls, findings, cannot_fail(run.calls, run.tensors, self._masks.count))
        except Exception as error:
            # The calls are listed even so, as not measured: the reader sees what the test ran.
            lost = Message("check.test.failed", error=kind_and_text(error))
            finding = Finding(UNMEASURED, "warn", "", None, None, lost, Message("check.test.fix_failed"), "")
            return AuditedTest(tuple(JudgedCall(call, UNMEASURED, reason=lost) for call in run.calls), (finding,), ())

    def _judged(self) -> tuple[tuple[JudgedCall, ...], tuple[Finding, ...]]:
        """Return the judged calls of the test, and the findings of all rules."""
        run, called = self._trace, self._called
        lost, idle_or_doubtful = silences(called, self._ran, run)
        judged = judge_all(run.calls, called)
        modules = named_modules(called, remove_duplicate=False)
        context = Context(
            model=called,
            calls=judged,
            mode="static" if run.calls and all(call.device == "meta" for call in run.calls) else "dynamic",
            ran=frozenset(
                path for path, part in modules if id(part) in self._ran or isinstance(part, torch.jit.ScriptModule)
            ),
            compare="never",
            lost=lost,
            idle_or_doubtful=idle_or_doubtful,
        )
        entries = [entry for rule in RULES.values() for entry in rule(context)]
        findings = [_of_test(entry, judged) for entry in entries if isinstance(entry, Finding)]
        return with_health(judged, findings), _each_once(findings)


def _of_test(finding: Finding, calls: Sequence[JudgedCall]) -> Finding:
    """Return the finding, as a note if a test passed its own scale to a function and it is not a known mistake."""
    if finding.site or finding.rule != "scale_ledger":
        return finding
    of_it = [judged for judged in calls if not judged.call.site and judged.call.scale.ratio == finding.value]
    if any(judged.mistake != UNKNOWN_MISTAKE for judged in of_it):
        return finding
    message = joined([finding.message, Message("check.test.outside_modules")])
    return replace(finding, severity="note", message=message)


def _each_once(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return the findings without repetition, however often the test ran the same attention."""
    alike: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        alike.setdefault((finding.rule, finding.severity, finding.site, finding.message), []).append(finding)
    return tuple(replace(one, call=None) if others else one for one, *others in alike.values())

"""`assert_laws` asserts a model's laws; `CalledModels` collects the models that a test calls, for the plugin."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from sqrtdk.audit.records import NOT_ASKED, Finding, LawAnswer
from sqrtdk.errors import SqrtdkError
from sqrtdk.laws.ask import LawReport, ask
from sqrtdk.models.modules import forward_arguments
from sqrtdk.testing.standing import (
    ALLOWED_KINDS,
    as_allowed,
    check_allowed,
    check_fail_on,
    count_text,
    failing,
    findings_lines,
    printable,
)

_COPIED_TYPES = Tensor | bool | int | float | str | None  # types of inputs that can be copied and given again


def assert_laws(
    model: nn.Module | str,
    inputs: Any = None,
    laws: str | Sequence[str] = "all",
    allow: str | Sequence[str] = (),
    *,
    fail_on: str = "fail",
    seed: int = 0,
) -> LawReport:
    """Ask laws of a model as `sqrtdk.laws.ask` does, and fail if one is broken.

    A law that is named but can't be asked fails too, and so does a model of which no law can be asked, because a test
    that checked nothing must not pass. To accept it, allow "not asked".

    Args:
        model: A module, which runs in evaluation mode and is left as it was; or a name that `sqrtdk check` takes.
        inputs: For forward: one tensor, a tuple or a dict. None makes up inputs from the model's config.
        laws: "all", or names of laws, in a sequence or joined by commas.
        allow: Findings to accept: sites ("layers.0.attn", "layers.*.attn"), rules ("law_padding"), "not asked".
        fail_on: Least severity that fails: "note", "warn", "fail" (default), "critical"; "never".
        seed: Seed of the runs.

    Returns:
        The answers.

    Raises:
        AssertionError: A law is broken at `fail_on` or above, or was not asked, and that is not allowed.
        InvalidValueError: An option is unknown, or a name in `allow` matches nothing that could be allowed.
        ModelError: The model can't be run, or no attention runs in it.

    Example:
        >>> assert_laws("demo", laws="causal, samples").broken
        ()
    """
    allowed = as_allowed(allow)
    check_fail_on(fail_on)
    report = ask(model, inputs, laws, seed)
    check_allowed(allowed, {finding.site for finding in report.findings}, {*ALLOWED_KINDS, NOT_ASKED})
    bad = failing(report.findings, (), fail_on, allowed)
    silent = [] if fail_on == "never" or NOT_ASKED in allowed else laws_not_asked(report, laws)
    if bad or silent:
        raise AssertionError("\n".join([_headline(report, bad, silent, fail_on), *broken_lines(bad, silent)]))
    return report


def laws_not_asked(report: LawReport, laws: str | Sequence[str]) -> list[LawAnswer]:
    """Return the answers for laws that should have been asked and were not.

    Args:
        report: Answers of all laws.
        laws: What the test asked for: names of laws, or "all".

    Returns:
        The named laws that were not asked. With "all", those that don't fit the model are passed over, unless no law at
        all was asked.
    """
    silent = [answer for answer in report.answers if answer.state == NOT_ASKED]
    return silent if laws not in ("all", ["all"], ("all",)) or len(silent) == len(report.answers) else []


def broken_lines(findings: Sequence[Finding], silent: Sequence[LawAnswer]) -> list[str]:
    """Return the lines of a failed test: one or more for each broken law, and one for each law that was not asked."""
    lines = [
        f"{answer.law}{f' ({answer.about})' if answer.about else ''}  {NOT_ASKED}: {answer.reason}" for answer in silent
    ]
    return [*findings_lines(findings, ()), *map(printable, lines)]


def _headline(report: LawReport, bad: Sequence[Finding], silent: Sequence[LawAnswer], fail_on: str) -> str:
    parts = [f"{count_text(len(bad), 'law')} broken"] if bad else []
    parts += [f"{count_text(len(silent), 'law')} not asked"] if silent else []
    return f"laws of {printable(report.model.cls)}: {', '.join(parts)} (fail_on: {fail_on})"


class CalledModels:
    """A context manager that collects every module that a test calls, with the inputs of its first call.

    It listens through torch's global hooks and changes nothing. Calls inside another module's call are not the test's
    own and are skipped.

    Example:
        >>> import torch
        >>> layer, x = nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(2, 5, 16)
        >>> with CalledModels() as called:
        ...     _ = layer(x, x, value=x)
        >>> [(type(module).__name__, sorted(inputs)) for module, inputs in called.calls]
        [('MultiheadAttention', ['key', 'query', 'value'])]
    """

    def __init__(self) -> None:
        self.calls: list[tuple[nn.Module, Mapping[str, Any] | tuple[Any, ...] | None]] = []
        self._depth = 0
        self._thread = threading.get_ident()
        self._handles: list[Any] = []

    def __enter__(self) -> CalledModels:
        self._thread = threading.get_ident()
        self._handles = [
            torch_module.register_module_forward_pre_hook(self._begins),
            # always_call: without it, a forward that raises would leave the depth wrong
            torch_module.register_module_forward_hook(self._ends, with_kwargs=True, always_call=True),
        ]
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()
            # torch's handle leaves its id in this table, and torch.compile takes that for a global hook and warns
            torch_module._global_forward_hooks_with_kwargs.pop(handle.id, None)

    def _begins(self, module: nn.Module, args: Any) -> None:
        if threading.get_ident() == self._thread:  # calls of other threads would mix up the depth
            self._depth += 1

    def _ends(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        self._depth -= 1
        # At depth 0 the outermost call has ended. A module that is called again is asked once.
        if self._depth == 0 and not any(module is known for known, _ in self.calls):
            self.calls.append((module, _inputs(module, args, kwargs)))

    def reports(self, laws: str | Sequence[str]) -> list[tuple[str, LawReport | str]]:
        """Ask the laws of each module that the test called.

        Args:
            laws: Names of laws, or "all".

        Returns:
            The class name of each module with its answers, or with the reason why it was not asked.
        """
        answers: list[tuple[str, LawReport | str]] = []
        for module, inputs in self.calls:
            try:
                answer: LawReport | str = (
                    "its inputs are more than tensors" if inputs is None else ask(module, inputs, laws)
                )
            except SqrtdkError as error:
                answer = str(error)
            answers.append((type(module).__name__, answer))
        return answers


def _inputs(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return a copy of a call's arguments, by name if any was given by name; None if one is not a tensor or number."""
    if not all(isinstance(value, _COPIED_TYPES) for value in (*args, *kwargs.values())):
        return None
    # Copies, because the test may change its tensors in place before the laws are asked.
    copies = [value.detach().clone() if isinstance(value, Tensor) else value for value in args]
    named = {name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in kwargs.items()}
    if not named:
        return tuple(copies)
    names = list(forward_arguments(module))
    return None if len(names) < len(copies) else {**dict(zip(names, copies, strict=False)), **named}

"""Law `parameters`: the parameters of an attention beside its projections have a part in its output.

Changed: one parameter that an attention module itself holds and that has one number for each head (sinks, slopes,
gains), or that no operation read; and one of a submodule that no gradient of the output reaches (`parts`). Compared:
the module's output, which must move. Parameter and output are put back exactly where the module ends, so one run asks
every class of module. It catches sinks that do not reach the softmax, a sink that is added to every logit of a head,
since softmax(z + c) = softmax(z), and a gate that is not called or whose result is not used.
Not asked: parameters with one number for all heads; projections (`k_proj.bias` has no part by the same formula); gains
and norms that are not read, which the rule `unused` names; modules that keep tensors beside their buffers, because they
may have read the parameter before; modules whose output is zero or that read no parameter at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk._wrappers import named_parameters
from sqrtdk.audit.configs import module_at
from sqrtdk.audit.records import LawAnswer
from sqrtdk.audit.rules.unused import GAIN_NAMES, NORM_NAMES
from sqrtdk.laws.answers import law_broken, law_holds
from sqrtdk.laws.moved import any_moved, moved_entries
from sqrtdk.laws.parts import parts_without_part
from sqrtdk.laws.subject import NotAsked, Subject
from sqrtdk.laws.traced import Traced, exchanged, traced, upwards
from sqrtdk.messages import Message
from sqrtdk.modules.structures import restored, walk
from sqrtdk.tracing.tensors import CallTensors

LAW = "parameters"
MOST_ROUNDS = 4  # runs; each changes one parameter of every class of module


@dataclass(slots=True, eq=False)
class _HeldParameter:
    """A parameter of an attention.

    Attributes:
        path: Path of the module that holds it.
        name: Its name in the module.
        parameter: The parameter.
        per_head: Whether it has one number for each head.
        unread: Whether no operation read it.
        added: Whether it is read, and a bias is added to the logits.
        part: The submodule that holds it and that no gradient reaches, or None.
        moves: Whether the output moved with it; None before it was changed.
    """

    path: str
    name: str
    parameter: nn.Parameter
    per_head: bool
    unread: bool
    added: bool
    part: str | None = None
    moves: bool | None = None


def ask(subject: Subject) -> Iterator[LawAnswer]:
    """Yield whether what an attention holds beside its projections (sinks, gains, gates) influences its output.

    There is a broken answer for each parameter or submodule without influence; if there are none, one answer that the
    law is kept.

    Raises:
        NotAsked: There is nothing to ask, or outputs of 0 decide nothing.
    """
    run = traced(subject)
    rounds = _rounds(subject, run, parts_without_part(subject))
    if not rounds:
        raise NotAsked(Message("laws.parameters.none"))
    for held in rounds:
        with ExitStack() as stack:
            for one in held:
                stack.enter_context(_parameter_changed(subject, one, run))
            outputs = subject.run({})
        if any_moved(subject.base, outputs):
            # The module's output was put back, so it leaves by an attribute: `self.aux = self.router(x)`, read outside.
            for one in held:
                if one.part is not None and not one.moves:
                    one.moves = True if len(held) == 1 else None  # of several it may be another
    asked = [one for held in rounds for one in held if one.moves is not None]
    if not asked:
        raise NotAsked(Message("laws.parameters.zero_outputs"))
    idle = [one for one in asked if not one.moves]
    if not idle:
        yield law_holds(LAW, ", ".join(dict.fromkeys(one.name for one in asked)))
    for one in idle:
        value = float(one.parameter.numel()) if one.part is None else None
        why, fix = _why_without_part(one)
        said = "laws.parameters.idle" if one.part is None else "laws.parameters.idle_part"
        message, source = Message(said, name=one.part or one.name, why=why), Message("laws.parameters.source")
        # XLNet's segment parameters, with several numbers for each head, are only read if token types are given.
        severity = "note" if one.unread and not one.per_head and one.part is None else "warn"
        yield law_broken(LAW, one.part or one.name, severity, one.path, message, fix, source, value=value)


def _why_without_part(one: _HeldParameter) -> tuple[Message, Message]:
    """Return why the parameter has no part, and the fix."""
    if one.added:
        return Message("laws.parameters.bias_of_head"), Message("laws.parameters.fix_bias")
    why = "laws.parameters.unread" if one.unread else "laws.parameters.not_at_output"
    return Message(why), Message("laws.parameters.fix" if one.part is None else "laws.parameters.fix_part")


def _rounds(subject: Subject, run: Traced, idle_parts: Mapping[str, list[str]]) -> list[list[_HeldParameter]]:
    """Return lists of parameters that are changed in one run: one of each class of module."""
    kinds: dict[Any, list[_HeldParameter]] = {}
    for tensors in run.calls.values():
        path = next((p for p in upwards(tensors.site) if _holds(module_at(subject.module, p))), None)
        if path is None or path not in run.passages:
            continue
        held = list(_candidates(subject, run, path, tensors))
        module = module_at(subject.module, path)
        kinds.setdefault((type(module), tuple((one.name, one.unread) for one in held)), held)
    for path, parts in idle_parts.items():
        kinds[path] = [held for part in parts for held in _of_part(subject, run, path, part)]
    lists = [held[:MOST_ROUNDS] for held in kinds.values() if held]
    return [[held[turn] for held in lists if turn < len(held)] for turn in range(max(map(len, lists), default=0))]


def _holds(module: nn.Module | None) -> bool:
    return module is not None and next(module.parameters(), None) is not None


def _candidates(subject: Subject, run: Traced, path: str, tensors: CallTensors) -> Iterator[_HeldParameter]:
    """Yield the module's own parameters that nothing read, or that have one number for each head."""
    module = module_at(subject.module, path)
    assert module is not None
    names = [f"{path}.{name}" if path else name for name, _ in named_parameters(module)]
    if all(name in run.unread for name in names):
        return  # the module ran in a way that was not followed
    call = tensors.call
    heads = 0 if call is None else call.heads
    biased = call is not None and call.bias is not None
    for name, parameter in module.named_parameters(recurse=False):
        unread = (f"{path}.{name}" if path else name) in run.unread
        known = name in GAIN_NAMES or name in NORM_NAMES
        per_head = heads > 1 and parameter.numel() == heads
        if not (per_head or unread) or (unread and known) or not _plain(parameter):
            continue
        if _caches(module):
            return
        yield _HeldParameter(path, name, parameter, per_head, unread, biased and not unread)


def _of_part(subject: Subject, run: Traced, path: str, part: str) -> Iterator[_HeldParameter]:
    """Yield the first parameter of a submodule that can be changed and put back."""
    inside = f"{path}.{part}" if path else part
    module = module_at(subject.module, inside)
    for name, parameter in () if module is None else named_parameters(module):
        if _plain(parameter):
            yield _HeldParameter(path, name, parameter, False, f"{inside}.{name}" in run.unread, False, part)
            return


def _caches(module: nn.Module) -> bool:
    """Return whether it keeps tensors that are not buffers: LeViT computes its biases once, and then keeps them."""
    own = {name: value for name, value in vars(module).items() if name not in ("_parameters", "_buffers", "_modules")}
    return next(walk(own, objects=False), None) is not None


def _plain(parameter: Tensor) -> bool:
    """Return whether the parameter can be changed and put back: it has storage of its own and finite numbers."""
    if type(parameter) is not nn.Parameter or parameter.is_meta or parameter.layout is not torch.strided:
        return False
    return parameter.is_floating_point() and bool(parameter.isfinite().all())


@contextmanager
def _parameter_changed(subject: Subject, one: _HeldParameter, run: Traced) -> Iterator[None]:
    """Change the parameter while its module runs for the first time; parameter and output are put back afterwards."""
    before, kept_as = run.passages[one.path].gives, one.parameter.detach().clone()
    module = module_at(subject.module, one.path)
    assert module is not None
    generator = torch.Generator().manual_seed(subject.seed)
    noise = torch.rand(kept_as.shape, generator=generator, dtype=torch.float64).to(kept_as)

    def put_back() -> None:
        one.parameter.data.copy_(kept_as)

    def entering(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Every number moves by at least half of its size, and a 0 by at least a half.
        one.parameter.data.copy_(kept_as + (1 + kept_as.abs()) * (0.5 + noise))

    def leaving(output: Any) -> Any:
        put_back()
        one.moves = _moves(before, output)
        return restored(output, before)

    try:
        with exchanged(module, entering, leaving):
            yield
    finally:
        put_back()


def _moves(before: Any, after: Any) -> bool | None:
    """Return whether any number moved, or None if every number is zero or not finite."""
    pairs = [
        (one, other)
        for (_, one), (_, other) in zip(walk(before, objects=False), walk(after, objects=False), strict=False)
        if one.is_floating_point() and one.shape == other.shape
    ]
    if not any(bool((one.isfinite() & (one != 0)).any()) for one, _ in pairs):
        return None
    return any(bool(moved_entries(one, other).any()) for one, other in pairs)

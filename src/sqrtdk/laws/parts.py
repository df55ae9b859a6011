"""Submodules of an attention whose parameters no gradient of its output reaches: candidates of the law `parameters`.

A gate that was dropped in a port (`g_proj`), whether it is not called or its result is not used. One run asks one
attention of every class: within the attention, autograd records which parameters the output was computed from, and no
backward pass is run. The flags of the parameters and the output are put back where the module ends.

Left out: norms of q and k, which the rule `unused` names; modules of several parts, which a run may not need (adapters,
one for each language; DeepSeek-V4's compressor, where the inputs are shorter than a block); modules that give integers,
as an indexer that picks keys does; the attentions of transformers and diffusers themselves, whose
parts wait for inputs of their own (LED's `query_global` for global tokens); a model as a whole, whose parts may
be heads for another task; attentions whose own projections the gradient does not reach (a forward under `no_grad`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from sqrtdk.audit.configs import module_at
from sqrtdk.audit.rules.unused import NORM_NAMES
from sqrtdk.laws.subject import NotAsked, Subject
from sqrtdk.laws.traced import Traced, exchanged, traced
from sqrtdk.models.attentions import named_like_attention
from sqrtdk.modules.calls import CallPlace, hooked
from sqrtdk.modules.structures import restored, walk

_KNOWN_CODE = ("transformers.", "diffusers.")


def parts_without_part(subject: Subject) -> dict[str, list[str]]:
    """Return the submodules of attentions that receive no gradient from the attention's output.

    One attention of each class is examined, with one backward-capable run for all. Classes of known libraries are
    skipped.

    Returns:
        A dict from the path of the attention to the names of such submodules. Empty if autograd refuses the run.
    """
    run = traced(subject)
    asked: dict[type[nn.Module], str] = {}
    for tensors in run.calls.values():
        module = module_at(subject.module, tensors.site)
        if module is None or tensors.site not in run.passages or isinstance(module, torch.jit.ScriptModule):
            continue
        if type(module).__module__.startswith(_KNOWN_CODE):
            continue
        if _parts(module) and (tensors.site or named_like_attention(module)):
            asked.setdefault(type(module), tensors.site)
    reached: dict[str, set[int]] = {}
    selecting: set[int] = set()
    try:
        with ExitStack() as stack:
            for path in asked.values():
                stack.enter_context(_recorded(subject, path, run, reached, selecting))
            if asked:
                subject.run({})
    except NotAsked:  # it writes to its parameters, or does what autograd refuses
        return {}
    found = {}
    for path, ids in reached.items():
        module = module_at(subject.module, path)
        parts = {} if module is None else _parts(module)
        idle = [name for name, part in parts.items() if not _ids(part) & ids and id(part) not in selecting]
        if idle and len(parts) - len(idle) >= 2:  # the projections are reached
            found[path] = idle
    return found


def _parts(module: nn.Module) -> Mapping[str, nn.Module]:
    return {
        name: part
        for name, part in module.named_children()
        if name not in NORM_NAMES and _ids(part) and next(part.children(), None) is None
    }


def _ids(part: nn.Module) -> set[int]:
    return {id(parameter) for parameter in part.parameters() if parameter.is_floating_point()}


@contextmanager
def _recorded(
    subject: Subject, path: str, run: Traced, reached: dict[str, set[int]], selecting: set[int]
) -> Iterator[None]:
    """Record the parameters from which the output of the module at `path` is computed, in its first call."""
    module = module_at(subject.module, path)
    assert module is not None
    own = [parameter for parameter in module.parameters() if parameter.is_floating_point()]
    flags = [parameter.requires_grad for parameter in own]
    enabled = torch.is_grad_enabled()
    before = run.passages[path].gives

    def entering(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal enabled
        enabled = torch.is_grad_enabled()
        for parameter in own:
            parameter.requires_grad_(True)
        torch.set_grad_enabled(True)

    def put_back() -> None:
        for parameter, flag in zip(own, flags, strict=True):
            parameter.requires_grad_(flag)

    def leaving(output: Any) -> Any:
        torch.set_grad_enabled(enabled)  # if the model raises, the run itself ends in the mode in which it began
        reached[path] = _leaves([tensor.grad_fn for _, tensor in walk(output, objects=False)])
        put_back()
        return restored(output, before)

    parts = _parts(module)

    def ends(place: CallPlace, args: Any, kwargs: Any, output: Any) -> None:
        if any(not tensor.is_floating_point() for _, tensor in walk(output, objects=False)):
            selecting.add(id(parts[place[0]]))

    try:
        with hooked(parts, ends=ends), exchanged(module, entering, leaving):
            yield
    finally:
        put_back()


def _leaves(functions: Sequence[Any]) -> set[int]:
    """Return the ids of the leaf tensors behind autograd's functions."""
    found, seen, stack = set(), set(), list(functions)
    while stack:
        function = stack.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        if hasattr(function, "variable"):
            found.add(id(function.variable))
        stack += [earlier for earlier, _ in function.next_functions]
    return found

"""Law `ranks`: several ranks that run one model give what one process gives.

Changed: the number of processes. The factory has built the model for the group that it found. A child process without
a group has it built once more, with the weights of all ranks (parts put together) and the whole inputs, and both run.
Compared: the outputs, put together of the ranks' parts; if they agree, the gradients of the parameters for a random
cotangent of the outputs; if they differ, what each module takes and gives, up to the first that differs. A language
model runs again with several documents in a row, and with padding on the left, which show what plain inputs hide.

What breaks it: masks over the rows of a shard, shards in another order, positions from 0 on every rank, documents or
windows that are lost between shards, keys that are left out or counted twice, gradients that are averaged where they
must be summed. Such a fault is named if the attention's formula with that change gives the ranks' output
(`sqrtdk.laws.processes.changes`, `.merges`).

Asked by name alone, under torchrun, of a model whose factory is known.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from sqrtdk.audit.guard import random_state
from sqrtdk.audit.records import LawAnswer
from sqrtdk.laws.answers import law_broken, law_holds, law_not_asked
from sqrtdk.laws.moved import HALF_DTYPES
from sqrtdk.laws.processes.channel import child_process, read_sentence, sent
from sqrtdk.laws.processes.runs import run_of_rank, state_of_rank
from sqrtdk.laws.subject import NotAsked, Subject
from sqrtdk.messages import Message, joined
from sqrtdk.models.records import LoadedModel
from sqrtdk.models.unchanged import unchanged
from sqrtdk.ranks.group import RankGroup

LAW = "ranks"
ALONE_SECONDS = 300.0  # that the model alone has for each step: to be built, to run
_PLAIN = (Tensor, bool, int, float, str, type(None))
# Names whose fix is that of another one; the fix of any other name has its own words.
_FORWARD_FIXES = {
    "remote_documents": "documents",
    "remote_window": "window",
    "remote_window_and_documents": "window_and_documents",
    "remote_padding": "padding",
    "remote_plain": "plain",
    "causal": "local_rows",
    **dict.fromkeys(("keys_left_out", "keys_left_out_step", "keys_twice", "keys_twice_step"), "steps"),
    **dict.fromkeys(("blocks_averaged", "blocks_added", "max_for_lse", "not_rescaled", "last_block"), "merge"),
    "lse_not_merged": "merge",
    **dict.fromkeys(("sink_per_block", "sink_dropped"), "sinks"),
}
_BACKWARD_FIXES = {
    **dict.fromkeys(("own_rows", "own_block", "not_sent", "wrong_rank", "own_keys"), "home"),
    "scale": "scale",
    **dict.fromkeys(("lse_cut", "lse_of_block"), "lse"),
}
_PARAMETERS_SHOWN = 6  # folded names of parameters in a sentence


def ask(subject: Subject) -> Iterator[LawAnswer]:
    """Refuse: one process has no ranks.

    Raises:
        NotAsked: Always.
    """
    raise NotAsked(Message("laws.ranks.one_process"))


def factory_name(factory: Callable[..., Any]) -> str | None:
    """Return the name by which another process finds a function; None if it has none, as a function in a function.

    Example:
        >>> factory_name(factory_name), factory_name(lambda: None)
        ('sqrtdk.laws.ranks:factory_name', None)
    """
    module, name = getattr(factory, "__module__", None), getattr(factory, "__qualname__", "<")
    if "<" in name or module is None:
        return None
    if module != "__main__":
        return f"{module}:{name}"
    main = sys.modules["__main__"]
    if (spec := getattr(main, "__spec__", None)) is not None:  # python -m package.module
        return f"{spec.name}:{name}"
    file = getattr(main, "__file__", None)
    return None if file is None else f"{file}:{name}"


def answers_of_ranks(
    group: RankGroup, loaded: LoadedModel, seed: int, *, seconds: float | None = None
) -> list[LawAnswer]:
    """Return the answers of all ranks, equal on every rank. Every rank must call this.

    Args:
        group: The ranks.
        loaded: This rank's model, and its inputs.
        seed: Seed of every run.
        seconds: Time that the model alone has for each step, at most `ALONE_SECONDS`; None takes these.
    """
    with group.shared_errors():
        return _answers(group, loaded, seed, min(seconds or ALONE_SECONDS, ALONE_SECONDS))


def _answers(group: RankGroup, loaded: LoadedModel, seed: int, seconds: float) -> list[LawAnswer]:
    reasons = [reason for reason in group.gather(_refused(loaded)) if reason is not None]
    if reasons:
        return [law_not_asked(LAW, "", reasons[0])]
    inputs = loaded.inputs
    positional = () if isinstance(inputs, dict) else tuple(map(str, range(len(inputs))))
    named = dict(inputs) if isinstance(inputs, dict) else dict(zip(positional, inputs, strict=True))
    own = {"inputs": _on_cpu(named), "states": state_of_rank(loaded.module)}
    every = group.gather(own)
    start = {
        "factory": loaded.id, "seed": seed, "positional": list(positional),
        "inputs": [one["inputs"] for one in every], "states": [one["states"] for one in every],
    }  # fmt: skip
    del every, own
    with ExitStack() as stack:
        stack.enter_context(random_state(loaded.module))
        stack.enter_context(unchanged(loaded.module))
        child = stack.enter_context(child_process(start, seconds)) if group.rank == 0 else None

        def wanted() -> dict[str, Any]:
            assert child is not None
            try:
                return child.wanted()
            except NotAsked as error:
                return {"answer": {"id": "not_asked", **sent(error.reason)}}

        while "run" in (step := group.first_says(wanted)):
            records = group.gather(_run(loaded, step["run"], group, seed, positional))
            if child is not None:
                child.give(records)
    return [_answer(step["answer"], group.size)]


def _refused(loaded: LoadedModel) -> str | None:
    """Return why a rank's model can't be held against another, or None."""
    if loaded.kind == "module":
        return Message("laws.ranks.no_factory")
    dtypes = {parameter.dtype for parameter in loaded.module.parameters()}
    if half := [dtype for dtype in HALF_DTYPES if dtype in dtypes]:
        return Message("laws.ranks.half", dtype=str(half[0]).removeprefix("torch."))
    values = loaded.inputs.values() if isinstance(loaded.inputs, dict) else loaded.inputs
    if odd := [value for value in values if not isinstance(value, _PLAIN)]:
        return Message("laws.ranks.odd_input", type=type(odd[0]).__name__)
    return None


def _on_cpu(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.detach().cpu() if isinstance(value, Tensor) else value for name, value in inputs.items()}


def _run(
    loaded: LoadedModel, wanted: Mapping[str, Any], group: RankGroup, seed: int, positional: tuple[str, ...]
) -> Any:
    """Run this rank's model as the child wants it."""
    device = next((parameter.device for parameter in loaded.module.parameters()), torch.device("cpu"))
    inputs = loaded.inputs
    if wanted["inputs"] is not None:
        mine = wanted["inputs"][group.rank]
        moved = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in mine.items()}
        inputs = tuple(moved[name] for name in positional) if positional else moved
    cotangents = None if wanted["cotangents"] is None else wanted["cotangents"][group.rank]
    training = bool(wanted.get("training"))
    # Dropout on different tokens needs different random numbers, so each rank has a seed of its own then.
    return run_of_rank(loaded.module, inputs, cotangents, seed=seed + training * group.rank, training=training)


# -- the answer --------------------------------------------------------------------------------------------------------


def _answer(answer: Mapping[str, Any], count: int) -> LawAnswer:
    """Return the answer that the child gave, as a law's."""
    kind, notes = answer["id"], [read_sentence(note) for note in answer.get("notes", ())]
    if kind == "kept":
        return law_holds(LAW, "", joined(notes) if notes else "")
    if kind == "not_asked":
        return law_not_asked(LAW, "", read_sentence(answer))
    source = Message("laws.ranks.source")
    site = answer.get("site", "")
    if kind == "outputs":
        names = [Message(f"laws.ranks.name.{one['name']}", **one["values"]) for one in answer["names"]]
        message: str = Message("laws.ranks.outputs", count=count)
        if answer["made"]:
            message = Message("laws.ranks.with_made", what=message, inputs=Message(f"laws.ranks.made.{answer['made']}"))
        if names:
            message = Message(
                "laws.ranks.named", what=message, name=joined(names, "or") if len(names) > 1 else names[0]
            )
        if "unread" in answer:
            message = Message("laws.ranks.unread", what=message, reason=read_sentence(answer["unread"]))
        code = answer["names"][0]["name"] if names else ""
        fix = Message(f"laws.ranks.fix.{_FORWARD_FIXES.get(code, code)}") if names else Message("laws.ranks.fix_place")
        return law_broken(LAW, "", "fail", site, message, fix, source)
    if kind == "gradient":
        return _of_gradient(answer, count)
    if kind == "dropout":
        message, fix = Message("laws.ranks.dropout", count=count), Message("laws.ranks.fix_dropout")
        return law_broken(LAW, "", "warn", site, message, fix, source)
    assert kind == "weights", kind
    message = Message("laws.ranks.weights", parameter=answer["parameter"])
    return law_broken(LAW, "", "fail", site, message, Message("laws.ranks.fix_weights"), source)


def _of_gradient(answer: Mapping[str, Any], count: int) -> LawAnswer:
    values: dict[str, str | int] = {"parameters": _few(answer["parameters"]), "ranks": count}
    if answer["factor"] is None:
        message = Message("laws.ranks.gradient_other", **values)
    elif answer["factor"] == "0":
        message = Message("laws.ranks.gradient_none", **values)
    else:
        message = Message("laws.ranks.gradient_scale", **values, factor=answer["factor"], others=answer["others"])
    message = Message("laws.ranks.gradients", what=message)
    if answer["behind"]:
        message = Message("laws.ranks.gradient_behind", what=message, parameters=_few(answer["behind"]))
    names = [Message(f"laws.ranks.backward.{one['name']}", **one["values"]) for one in answer["names"]]
    if names:
        message = Message("laws.ranks.named", what=message, name=joined(names, "or") if len(names) > 1 else names[0])
    code = answer["names"][0]["name"] if names else ""
    fix = Message(f"laws.ranks.backward_fix.{_BACKWARD_FIXES[code]}") if names else Message("laws.ranks.fix_gradient")
    return law_broken(LAW, "", "fail", answer["site"], message, fix, Message("laws.ranks.source"))


def _few(parameters: Sequence[str]) -> str:
    """Return the names of parameters, with a number for those beyond the first few."""
    if len(parameters) <= _PARAMETERS_SHOWN:
        return joined([*parameters], "comma")
    shown, rest = joined([*parameters[:_PARAMETERS_SHOWN]], "comma"), len(parameters) - _PARAMETERS_SHOWN
    return Message("laws.ranks.parameters_more", shown=shown, rest=rest)

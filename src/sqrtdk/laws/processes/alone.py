"""The model on one process: a child without a group builds it again, and holds the ranks' runs against its own.

    python -m sqrtdk.laws.processes.alone FOLDER

FOLDER has `start.pt`: the factory, the weights and inputs of all ranks. For each run that the child wants of the ranks
it writes `wanted.pt` and a line on its stdout, and reads a line on stdin once `runs.pt` is there. At the end it writes
`answer.json`. What the user's code prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk.audit.own_module import from_module
from sqrtdk.errors import SqrtdkError, kind_and_text, said_by
from sqrtdk.laws.processes.backward_names import names_of_backward
from sqrtdk.laws.processes.channel import sent
from sqrtdk.laws.processes.drops import dropouts_of, dropped_alike, has_other_tokens
from sqrtdk.laws.processes.formula import RanksChange
from sqrtdk.laws.processes.gradients import GradientsBeside, folded_parameters, gradients_beside
from sqrtdk.laws.processes.inputs_of_ranks import (
    POSITION_NAMES,
    NamedInputs,
    WholeInputs,
    put_weights,
    token_axis,
    whole_inputs,
)
from sqrtdk.laws.processes.made_inputs import made_inputs
from sqrtdk.laws.processes.parting import NotedCall, RunsBeside, inside
from sqrtdk.laws.processes.runs import RunRecord, run_of_rank, run_with_graph
from sqrtdk.laws.processes.shards import PAD, ShardLayout, TokenPlaces, filled_up
from sqrtdk.laws.subject import NotAsked
from sqrtdk.messages import Message
from sqrtdk.models.factory import call_factory
from sqrtdk.models.load import resolve_model
from sqrtdk.models.options import LoadOptions
from sqrtdk.models.records import Inputs, LoadedModel
from sqrtdk.tracing import Trace
from sqrtdk.tracing.tensors import CallTensors

Wanted = dict[str, Any]  # inputs and cotangents by rank, each None for the ranks' own
Answer = dict[str, Any]  # id of the message and its values, site, name


def load_alone(factory: str, seed: int) -> LoadedModel:
    """Build the model of a factory in a process without a group.

    Args:
        factory: A MODEL argument, or `/path/to/file.py:function` of a script that was started by its path.
        seed: Seed of the weights and of inputs that are made.
    """
    file, _, name = factory.rpartition(":")
    if not file.endswith(".py"):
        return resolve_model(factory, LoadOptions(seed=seed))
    sys.path.insert(0, os.path.dirname(file))
    target: Any = runpy.run_path(file, run_name="sqrtdk_alone")
    function = target[name.partition(".")[0]]
    for part in name.split(".")[1:]:
        function = getattr(function, part)
    module, inputs = call_factory(function, seed=seed)
    return from_module(module, inputs, LoadOptions(seed=seed))


@dataclass(slots=True, eq=False)
class ModelAlone:
    """The model on one process, and how to have the ranks run theirs.

    Attributes:
        module: The module, with the weights of the ranks.
        run_ranks: Has all ranks run; returns their records.
        count: Number of ranks.
        seed: Seed of every run.
        parts: The inputs of each rank.
        positional: Names of the inputs that are passed by position.
        notes: What restricts the answer that the law is kept.
        unread: Why the attention that differs has no formula; "" if it has one.
    """

    module: nn.Module
    run_ranks: Callable[[Wanted], Sequence[RunRecord]]
    count: int
    seed: int
    parts: Sequence[NamedInputs]
    positional: tuple[str, ...] = ()
    notes: list[Message] = field(default_factory=list)
    unread: str = ""

    def run(self, inputs: Mapping[str, Any], cotangents: Mapping[str, Tensor | None] | None = None) -> RunRecord:
        """Run alone.

        Raises:
            NotAsked: The model raises.
        """
        record = run_of_rank(self.module, self._as_passed(inputs), cotangents, seed=self.seed)
        if record["error"]:
            raise NotAsked(Message("laws.ranks.alone_raised", error=record["error"]))
        return record

    def _as_passed(self, inputs: Mapping[str, Any]) -> Inputs:
        return tuple(inputs[name] for name in self.positional) if self.positional else dict(inputs)

    def traced(self, inputs: Mapping[str, Any]) -> dict[tuple[str, int], CallTensors]:
        """Return the attentions of a run alone, by site and index."""
        with Trace(self.module, stats=False, numeric=False, keep=True) as trace:
            self.run(inputs)
        return {(call.site, call.index): call for call in trace.tensors}

    def ranks(self, wanted: Wanted) -> Sequence[RunRecord]:
        """Have all ranks run.

        Raises:
            NotAsked: The model raises on a rank.
        """
        records = self.run_ranks(wanted)
        for rank, record in enumerate(records):
            if record["error"]:
                raise NotAsked(Message("laws.ranks.rank_raised", rank=rank, error=record["error"]))
        return records

    def judge(self, own: NamedInputs | None) -> Answer:
        """Return the answer: kept, or where and how the ranks part from this process.

        Raises:
            NotAsked: The two can't be compared.
        """
        ranks = self.ranks({"inputs": None, "cotangents": None})
        first: tuple[WholeInputs, RunsBeside, dict[str, Any]] | None = None
        for whole in whole_inputs(own, self.parts):
            beside = RunsBeside(self.run(whole.inputs), ranks, whole.places, whole.tokens)
            outputs = beside.outputs()
            if all(layout is not None for layout in outputs.values()):
                if whole.strange:
                    self.notes.append(Message("laws.ranks.strange_input", name=whole.strange[0]))
                if left := [name for name in beside.numbers() if name not in outputs]:
                    self.notes.append(Message("laws.ranks.own_number", name=left[0]))
                return (
                    self._of_gradients(whole, outputs, beside)
                    or self._of_made(whole)
                    or self._of_dropout(whole)
                    or {"id": "kept"}
                )
            first = first or (whole, beside, outputs)
        assert first is not None
        return self._broken(*first[:2])

    # -- what differs --------------------------------------------------------------------------------------------------

    def _broken(self, whole: WholeInputs, beside: RunsBeside, made: str = "") -> Answer:
        call = beside.first()
        changes = self._names(whole, beside, call)
        site = "" if call is None else call.place[0]
        names = [{"name": change.name, "values": dict(change.values)} for change in changes]
        unread = {"unread": sent(self.unread)} if self.unread and not names else {}
        return {"id": "outputs", "site": site, "names": names, "made": made, **unread}

    def _names(self, whole: WholeInputs, beside: RunsBeside, call: NotedCall | None) -> list[RanksChange]:
        if whole.strange and (change := self._name_of_input(whole, beside)) is not None:
            return [change]
        if (change := self._name_of_padding(whole, beside)) is not None:
            return [change]
        if call is None:
            return []
        if (change := beside.name_of_rows(call) or beside.name_of_scale(call)) is not None:
            return [change]
        calls = self.traced(whole.inputs)
        attention = inside(call.place[0], calls)
        if attention is None:
            return []
        self.unread = attention.missing or ""

        def shards(places: TokenPlaces) -> tuple[list[CallTensors], CallTensors | None] | None:
            key = attention.site, attention.index
            try:
                pieces = [
                    self.traced(self._tokens_at(whole, piece[piece != PAD])).get(key) for piece in places.pieces()
                ]
                stored = self.traced(self._tokens_at(whole, torch.cat(places.pieces()))).get(key)
            except NotAsked:  # the model has a length of its own
                return None
            found = [piece for piece in pieces if piece is not None]
            return (found, stored) if len(found) == len(pieces) else None

        return beside.names_of_attention(attention, shards)

    def _tokens_at(self, whole: WholeInputs, places: Tensor) -> NamedInputs:
        """Return the inputs at some places, with positions that begin at 0."""
        inputs = dict(whole.inputs)
        for name, value in whole.inputs.items():
            axis = token_axis(value, whole.tokens) if isinstance(value, Tensor) else None
            if axis is not None:
                inputs[name] = value.index_select(axis, places)
                if name in POSITION_NAMES and axis == value.dim() - 1:
                    inputs[name] = torch.arange(len(places)).expand_as(inputs[name]).clone()
        return inputs

    def _name_of_input(self, whole: WholeInputs, beside: RunsBeside) -> RanksChange | None:
        """Return the change that this process gets an input as the ranks have it, if it then gives their outputs."""
        if whole.places is None:
            return None
        for name in whole.strange:
            value = whole.inputs[name]
            axis = whole.axes.get(name, token_axis(value, whole.tokens))
            if axis is None:
                continue
            made = value.clone()
            for rank, places in enumerate(whole.places.of_ranks):
                part, real = self.parts[rank][name], places != PAD
                if part.dim() != value.dim() or part.shape[axis] != len(places):
                    return None
                index = [slice(None)] * value.dim()
                index[axis] = places[real]  # type: ignore[call-overload]
                made[tuple(index)] = part.index_select(axis, torch.nonzero(real).flatten())
            other = RunsBeside(self.run({**whole.inputs, name: made}), beside.ranks, whole.places, whole.tokens)
            if all(layout is not None for layout in other.outputs().values()):
                local = all(_from_zero(part[name]) for part in self.parts)
                return RanksChange("positions" if local else "input", made, () if local else (("input", name),))
        return None

    def _name_of_padding(self, whole: WholeInputs, beside: RunsBeside) -> RanksChange | None:
        """Return the change that what fills up uneven shards is tokens, if this process then gives the same."""
        if whole.places is None or (places := filled_up(whole.places)) is None:
            return None
        made = dict(whole.inputs)
        for name, axis in whole.axes.items():
            shape = list(whole.inputs[name].shape)
            shape[axis] = places.total
            layout = ShardLayout(tuple({axis: one} for one in places.of_ranks))
            made[name] = layout.whole([part[name] for part in self.parts], tuple(shape))
        try:
            other = RunsBeside(self.run(made), beside.ranks, places, places.total)
            alike = all(layout is not None for layout in other.outputs().values())
        except NotAsked:  # the model has a length of its own
            return None
        return RanksChange("uneven", torch.empty(0)) if alike else None

    # -- gradients -----------------------------------------------------------------------------------------------------

    def _of_gradients(self, whole: WholeInputs, outputs: Mapping[str, Any], runs: RunsBeside) -> Answer | None:
        """Return the answer that a gradient of a parameter differs, or None."""
        made = torch.Generator().manual_seed(self.seed)
        base = self.run(whole.inputs)["outputs"]
        cotangents = {name: torch.randn(base[name].shape, generator=made).to(base[name]) for name in outputs}
        if not any(parameter.requires_grad for parameter in self.module.parameters()):
            return None
        parts = [
            {name: layout.part(cotangents[name], rank) for name, layout in outputs.items()}
            for rank in range(self.count)
        ]
        try:
            alone = self.run(whole.inputs, cotangents)
            records = self.ranks({"inputs": None, "cotangents": parts})
        except NotAsked as error:
            self.notes.append(Message("laws.ranks.no_gradients", reason=error.reason))
            return None
        grads = [record["grads"] for record in records]
        if not alone["grads"] or not all(grads):
            self.notes.append(Message("laws.ranks.no_gradients", reason=Message("laws.ranks.no_graph")))
            return None
        beside = gradients_beside(alone["grads"], grads)
        if beside.fault is not None:
            return self._of_fault(whole, cotangents, runs, grads, beside)
        if beside.factor != 1:
            self.notes.append(Message("laws.ranks.gradient_factor", factor=str(beside.factor)))
        return None

    def _of_fault(
        self, whole: WholeInputs, cotangents: Mapping[str, Tensor | None], runs: RunsBeside,
        grads: Sequence[Mapping[str, Tensor]], beside: GradientsBeside,
    ) -> Answer:  # fmt: skip
        fault = beside.fault
        assert fault is not None
        torch.manual_seed(self.seed)
        names = names_of_backward(
            self.module, lambda: run_with_graph(self.module, self._as_passed(whole.inputs)), cotangents,
            runs.hypotheses(), grads, beside,
        )  # fmt: skip
        return {
            "id": "gradient", "site": fault.parameters[-1].rpartition(".")[0],
            "parameters": folded_parameters(fault.parameters), "behind": folded_parameters(fault.behind),
            "factor": None if fault.factor is None else str(fault.factor), "others": str(fault.others),
            "names": [{"name": one.name, "values": dict(one.values)} for one in names],
        }  # fmt: skip

    # -- inputs that are made ------------------------------------------------------------------------------------------

    def _of_made(self, whole: WholeInputs) -> Answer | None:
        """Return the answer for inputs that separate faults which the ranks' own inputs may not show, or None."""
        for name, other in made_inputs(self.module, whole, self.seed):
            parts = [other.of_rank(other.inputs, rank) for rank in range(self.count)]
            try:
                alone = self.run(other.inputs)
                beside = RunsBeside(
                    alone, self.ranks({"inputs": parts, "cotangents": None}), other.places, other.tokens
                )
                outputs = beside.outputs()
            except NotAsked:  # the model does not take such inputs
                continue
            if any(layout is None for layout in outputs.values()):
                return self._broken(other, beside, name)
        return None

    def _of_dropout(self, whole: WholeInputs) -> Answer | None:
        """Return the answer that ranks with other tokens drop the same entries, whatever their seeds; or None."""
        drops = dropouts_of(self.module)
        pairs = [(a, b) for a in range(self.count) for b in range(a) if has_other_tokens(whole, a, b)]
        if not drops or not pairs:
            return None
        try:
            records = self.ranks({"inputs": None, "cotangents": None, "training": True})
        except NotAsked as error:
            self.notes.append(Message("laws.ranks.no_dropout", reason=error.reason))
            return None
        site = dropped_alike(records, drops, pairs)
        return None if site is None else {"id": "dropout", "site": site}


def _from_zero(value: Tensor) -> bool:
    return value.dim() > 0 and bool((value == torch.arange(value.shape[-1])).all())


# -- the process -------------------------------------------------------------------------------------------------------


def answer_of(start: Mapping[str, Any], run_ranks: Callable[[Wanted], Sequence[RunRecord]]) -> Answer:
    """Build the model and judge the ranks' runs; an answer in every case.

    Args:
        start: `factory`, `seed`, `positional`, and of each rank `inputs` and `states`.
        run_ranks: Has all ranks run.
    """
    try:
        loaded = load_alone(start["factory"], start["seed"])
        module, parts = loaded.module, start["inputs"]
        other = put_weights(module, start["states"])
        if other:
            return {"id": "weights", "site": other.rpartition(".")[0], "parameter": other}
        names = tuple(start["positional"])
        given = loaded.inputs
        own = dict(given) if isinstance(given, dict) else {str(number): value for number, value in enumerate(given)}
        model = ModelAlone(module, run_ranks, len(parts), start["seed"], parts, names)
        answer = model.judge(own)
        return answer | {"notes": [sent(note) for note in model.notes]}
    except NotAsked as error:
        return {"id": "not_asked", **sent(error.reason)}
    except SqrtdkError as error:
        reason = str(said_by(error)).partition("\n")[0]
    except Exception as error:  # tensors of a kind that lacks an operation
        reason = kind_and_text(error, 160)
    return {"id": "not_asked", **sent(Message("laws.ranks.not_built", error=reason))}


def _main(folder: Path) -> None:
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    torch.set_num_threads(1)

    def run_ranks(wanted: Wanted) -> Sequence[RunRecord]:
        torch.save(wanted, folder / "wanted.pt")
        print("wanted", file=channel, flush=True)
        if not sys.stdin.readline():
            raise SystemExit(1)  # the rank that asked has ended
        records: Sequence[RunRecord] = torch.load(folder / "runs.pt", weights_only=True)
        return records

    start = torch.load(folder / "start.pt", weights_only=True)
    (folder / "answer.json").write_text(json.dumps(answer_of(start, run_ranks)), encoding="utf-8")
    print("answer", file=channel, flush=True)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))

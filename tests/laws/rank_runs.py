"""Asks the law `ranks` of cases on real ranks; rank 0 writes the answers of each case."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sqrtdk.laws import ask
from sqrtdk.messages import Message
from tests.laws import rank_hf, rank_meshes, rank_models
from tests.laws.rank_models import Decoder, packed_inputs, sharded
from tests.monitor.ranks_at_work import join

FILES = (rank_models, rank_meshes, rank_hf)
MODELS, MESHES, _ = (file.__name__ for file in FILES)
RIGHT = [f"{file.__name__}:{name}" for file in FILES for name in file.RIGHT]
FAULTS = {f"{file.__name__}:{name}": code for file in (rank_models, rank_hf) for name, (code, _) in file.FAULTS.items()}
PLACED = {f"{MESHES}:{name}": code for name, (code, _) in rank_meshes.FAULTS.items()}
TWO_AT_ONCE = [f"{MESHES}:{name}" for name in rank_meshes.TWO_AT_ONCE]
EVERY_FAULT = FAULTS | PLACED
TEN_FAULTS = {f"{file.__name__}:{name}": EVERY_FAULT[f"{file.__name__}:{name}"] for file, name in (
    (rank_hf, "mistral_window"), (rank_hf, "mistral_documents"), (rank_hf, "mistral_positions"),
    (rank_models, "local_rows"), (rank_models, "plain_order"), (rank_models, "left_out"),
    (rank_models, "remote_both"), (rank_models, "documents_numbered"), (rank_models, "lse_base"),
    (rank_models, "backward_not_sent"),
)}  # fmt: skip
OTHER_FAULTS = {case: code for case, code in EVERY_FAULT.items() if case not in TEN_FAULTS}
TEN_RIGHT = [f"{file.__name__}:{name}" for file, name in (
    (rank_hf, "mistral"), (rank_models, "gather_zigzag"), (rank_models, "ring"), (rank_models, "ring_striped"),
    (rank_models, "ulysses"), (rank_models, "sinks"), (rank_models, "by_hand_zigzag"), (rank_meshes, "tensor"),
    (rank_meshes, "fsdp"), (rank_meshes, "pipeline"),
)]  # fmt: skip
QUICK = {f"{MODELS}:ring_zigzag": "", f"{MODELS}:window": "window"}


def raises_alone() -> tuple[nn.Module, Any]:
    """A factory that knows ranks alone."""
    if not dist.is_initialized():
        raise RuntimeError("this model needs a group")
    return sharded("ring")


def dies_alone() -> tuple[nn.Module, Any]:
    if not dist.is_initialized():
        os._exit(3)
    return sharded("ring")


def hangs_alone() -> tuple[nn.Module, Any]:
    if not dist.is_initialized():
        time.sleep(600.0)
    return sharded("ring")


def other_weights() -> tuple[nn.Module, Any]:
    """Each rank has made its own."""
    model, inputs = sharded("ring")
    if dist.is_initialized():
        torch.manual_seed(dist.get_rank())
        nn.init.normal_(model.layers[1].v.weight)
    return model, inputs


def half() -> tuple[nn.Module, Any]:
    model, inputs = sharded("ring")
    return model.bfloat16(), inputs


ODD = {"raises_alone": raises_alone, "dies_alone": dies_alone, "other_weights": other_weights, "half": half}


def answers_of(model: Any, inputs: Any = None, seconds: float | None = None) -> list[dict[str, Any]]:
    """The answers of a case: state, site, the ids of its messages."""
    report = ask(model, inputs, laws="ranks", seconds=seconds)
    return [
        {"state": one.state, "site": one.site, "reason": str(one.reason), "ids": _ids(one.reason)}
        for one in report.answers
    ]


def _ids(sentence: object) -> list[str]:
    if not isinstance(sentence, Message):
        return []
    return [sentence.id, *(id for value in sentence.values.values() for id in _ids(value))]


def work_of(rank: int, size: int, folder: Path, cases: Sequence[str]) -> None:
    join(rank, size, folder)
    _written(folder, rank, {case: answers_of(case) for case in cases})


def quick_work(rank: int, size: int, folder: Path) -> None:
    join(rank, size, folder)
    found = {case: answers_of(case) for case in QUICK}
    _written(folder, rank, found | {"module": answers_of(Decoder("ring"), packed_inputs())})


def odd_work(rank: int, size: int, folder: Path) -> None:
    join(rank, size, folder)
    found = {name: answers_of(factory) for name, factory in ODD.items()}
    _written(folder, rank, found | {"hangs_alone": answers_of(hangs_alone, seconds=20.0)})


def _written(folder: Path, rank: int, found: dict[str, Any]) -> None:
    (folder / f"answers-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()

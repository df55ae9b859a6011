"""Every kind of parallelism, asked in four ways: check, watch, the law `ranks`, record. Processes are real (gloo).

python -m tests.ranks.kinds 4          # the table for four ranks, as JSON: what each way says of each kind
python -m tests.ranks.kinds 2 ring     # of some kinds
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import sqrtdk
from sqrtdk import laws
from sqrtdk.errors import SqrtdkError
from sqrtdk.monitor.watch import watch
from tests.laws.rank_models import ranks
from tests.monitor import ranks_at_work
from tests.ranks.kind_models import NOT_JOINED, Model, kinds, shard_of, whole_inputs

LIMIT = 1e-9  # of entropies in nats


# -- the four ways -----------------------------------------------------------------------------------------------------


def entropies(report: Any) -> dict[str, list[float]]:
    return {
        judged.call.site.partition("@")[0]: [] if judged.call.stats is None else list(judged.call.stats.entropy_nats)
        for judged in report.calls
    }


def checked(name: str) -> dict[str, Any]:
    model, inputs = kinds(ranks()[1])[name]()
    report = sqrtdk.check(model, inputs, laws="none")
    formulas = sorted({judged.call.formula for judged in report.calls})
    return {"exit": report.exit_code, "formulas": formulas, "n": entropies(report)}


def watched(name: str, group: Any = None, shards: Any = None) -> dict[str, Any]:
    model, inputs = kinds(ranks()[1])[name]() if dist.is_initialized() else (Model().eval(), whole_inputs(name))
    with torch.no_grad(), watch(model, every=1, on_alarm=lambda alarm: None, group=group, shards=shards) as health:
        model(**inputs)
        health.step()
    calls = health.samples[0].calls
    found = {call.site.partition("@")[0]: list(call.columns.get("entropy_nats", ())) for call in calls}
    return {"n": found, "reasons": sorted({str(call.reason) for call in calls if call.reason})}


def watch_options(name: str) -> dict[str, Any]:
    size = ranks()[1]
    if name == "tensor":
        return {"group": init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))}
    if name in ("sequence", "ulysses"):
        return {"shards": "heads"}
    if name == "pipeline":
        return {"shards": "stages"}
    if name == "tensor_and_ring":
        return {"group": init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp")), "shards": {"cp": "rows"}}
    if name == "fsdp2_and_tensor":
        return {"group": init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))}
    return {}


def asked(name: str) -> dict[str, Any]:
    (answer,) = laws.ask(f"tests.ranks.kind_models:{name}", laws="ranks").answers
    return {"state": answer.state, "reason": str(answer.reason)}


def recorded(name: str, folder: Path) -> dict[str, Any]:
    model, inputs = kinds(ranks()[1])[name]()
    sqrtdk.record(model, inputs, folder / f"{name}-rank{ranks()[0]}.safetensors", shard=shard_of(name))
    return {"written": True}


def tried(way: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a way says, or its error."""
    start = time.monotonic()
    try:
        found = way()
    except SqrtdkError as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    return found | {"seconds": round(time.monotonic() - start, 1)}


def work_of(rank: int, size: int, folder: Path, names: tuple[str, ...] = ()) -> None:
    """Ask all kinds, or some, in all ways; each rank writes what it was told."""
    ranks_at_work.join(rank, size, folder)
    found: dict[str, Any] = {}
    for name in names or kinds(size):
        found[name] = {
            "check": tried(partial(checked, name)),
            "watch": tried(partial(watched, name, **watch_options(name))),
            "law": tried(partial(asked, name)),
            "record": tried(partial(recorded, name, folder)),
        }
        (folder / f"{rank}.json").write_text(json.dumps(found))
        dist.barrier()
    dist.destroy_process_group()


def record_of(rank: int, size: int, folder: Path, names: tuple[str, ...]) -> None:
    """Write the files of some kinds."""
    ranks_at_work.join(rank, size, folder)
    for name in names:
        recorded(name, folder)
    dist.barrier()
    dist.destroy_process_group()


def run_records(size: int, folder: Path, names: tuple[str, ...]) -> None:
    """Start the ranks, which write the files of some kinds."""
    ranks_at_work.run(partial(record_of, names=names), size, folder)


# -- the table ---------------------------------------------------------------------------------------------------------


def table(folder: Path, size: int) -> dict[str, dict[str, str]]:
    """What each way says of each kind on all ranks, in a word or a reason: "as one process", "kept"."""
    every = ranks_at_work.written(folder, size)
    found = {}
    for name in every[0]:
        of_ranks = [told[name] for told in every]
        model, inputs = Model().eval(), whole_inputs(name)
        right = entropies(sqrtdk.check(model, inputs, laws="none"))
        row = {
            "check": _figures([told["check"] for told in of_ranks], right),
            "watch": _figures([told["watch"] for told in of_ranks], watched(name)["n"]),
            "law": "; ".join(sorted({_law(told["law"]) for told in of_ranks})),
        }
        written = [told["record"] for told in of_ranks]
        row["record"] = written[0].get("error") or files(folder, name, size)
        found[name] = row
    return found


def _law(told: dict[str, Any]) -> str:
    """What the law says, with its reason unless it is kept."""
    if "error" in told:
        return str(told["error"])
    return told["state"] if told["state"] == "kept" else f"{told['state']}: {told['reason']}"


def _figures(told: list[dict[str, Any]], right: dict[str, list[float]]) -> str:
    """Whether all ranks have the figures of one process."""
    for each in told:
        if "error" in each:
            return str(each["error"])
        if each["n"].keys() != right.keys():
            return f"other attentions: {sorted(each['n'])}"
        for site, wanted in right.items():
            got = each["n"][site]
            if len(got) != len(wanted):
                return f"no figures of {site}: {each.get('reasons')}"
            if max(abs(a - b) for a, b in zip(got, wanted, strict=True)) > LIMIT:
                return f"other figures of {site}"
        if each.get("exit"):
            return "findings"
    return "as one process"


def files(folder: Path, name: str, size: int) -> str:
    """Whether the files of ranks are one process: all together, or each on its own samples or layers."""
    if name in NOT_JOINED:
        return "not put together: no shard of samples or layers"
    try:
        report = sqrtdk.diff(Model().eval(), folder / f"{name}-rank*.safetensors", whole_inputs(name))
    except SqrtdkError as error:
        return f"{type(error).__name__}: {error}"
    return "same" if report.same else f"not the same: {report.paragraphs[:1]}"


def run(size: int, folder: Path, names: tuple[str, ...] = ()) -> dict[str, dict[str, str]]:
    """Start the ranks, and return the table."""
    ranks_at_work.run(partial(work_of, names=names), size, folder)
    return table(folder, size)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        print(json.dumps(run(int(sys.argv[1]), Path(made), tuple(sys.argv[2:])), indent=1))

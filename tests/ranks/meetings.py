"""What ranks hear of one another where they meet: of values, of errors, and of a rank that is late."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

import sqrtdk
from sqrtdk.ranks.group import RanksError, world
from tests.ranks.split_models import Decoder, mine, ring

_SECONDS = 2.0  # that a rank waits here for one that does not come


def _heard(act: Callable[[], object]) -> str:
    try:
        return f"nothing, but {act()}"
    except RanksError as error:
        return str(error)


def work(rank: int, size: int, folder: Path) -> None:
    """Each rank writes what it heard."""
    method = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    ranks = world()
    assert ranks is not None

    def raises(text: str, stuck: bool = False) -> None:
        with ranks.shared_errors():
            if rank == 1:
                raise ValueError(text)
            if stuck:
                time.sleep(0.5)
                raise RuntimeError("the other rank left")
            ranks.gather(None)

    found: dict[str, Any] = {"gathered": ranks.gather(10 * rank), "said": ranks.first_says(lambda: f"rank {rank}")}
    found["raised"] = _heard(lambda: raises("no such weights"))
    found["stuck"] = _heard(lambda: raises("not in time", stuck=True))
    found["after"] = ranks.gather(1)
    found["unlike"] = _heard(
        lambda: sqrtdk.check(Decoder(ring).eval(), mine("plain"), laws="none", seed=rank),
    )
    ranks.seconds = _SECONDS

    def late() -> None:
        if rank == 1:
            time.sleep(2.0 * _SECONDS)
        ranks.gather(None)

    found["late"] = _heard(late)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()

"""Engines: the places that compute the cells of a sweep or the checkpoints of a run. All give the same numbers."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from contextlib import AbstractContextManager

from sqrtdk.engines._engine import Cell as Cell
from sqrtdk.engines._engine import Engine as Engine
from sqrtdk.engines._engine import local
from sqrtdk.engines._pool import pool
from sqrtdk.engines._ray import ray
from sqrtdk.errors import InvalidValueError

ENGINES: dict[str, Callable[[int | None, str | None], AbstractContextManager[Engine]]] = {
    "local": local,
    "pool": pool,
    "ray": ray,
}


def open_engine(name: str, workers: int | None = None, address: str | None = None) -> AbstractContextManager[Engine]:
    """Open an engine; leaving the context ends what it started.

    Args:
        name: "local" (this process), "pool" (processes of this machine) or "ray" (a cluster; needs the extra `ray`).
        workers: cells computed at once; None: one for each CPU. "local" has one.
        address: address of a Ray cluster, "host:port" or "auto"; None: start one on this machine.

    Returns:
        A context manager that yields an `Engine`; see `Engine.results`. If an exception (Ctrl-C included) leaves it, it
        ends its processes at once.

    Raises:
        InvalidValueError: unknown engine, fewer than one worker, more than one for "local", or an address for an engine
            other than "ray".
        LabError: on entering: no Ray at the address, or its workers have another Python, torch or sqrtdk.
        MissingExtraError: ray or joblib, which has the pool, is not installed.

    Example:
        >>> with open_engine("local") as engine:
        ...     list(engine.results(len, [{"d_k": 64}, {}]))
        [(0, 1), (1, 0)]
    """
    if name not in ENGINES:
        near = difflib.get_close_matches(name, ENGINES, n=1)
        raise InvalidValueError(
            f"an engine is one of {', '.join(ENGINES)}; got {name!r}",
            hint=f"Did you mean {near[0]!r}?" if near else "'pool' uses every CPU of this machine.",
        )
    if workers is not None and workers < 1:
        raise InvalidValueError(f"workers are at least 1; got {workers}", hint="Leave it out for one a CPU.")
    if address is not None and name != "ray":
        raise InvalidValueError(
            f"an address is for the engine 'ray'; got {address!r} for {name!r}", hint="Leave it out, or take 'ray'."
        )
    return ENGINES[name](workers, address)

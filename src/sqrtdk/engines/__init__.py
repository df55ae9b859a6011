"""Engines: the places that compute the cells of a sweep or the checkpoints of a run. All give the same numbers."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from contextlib import AbstractContextManager

from sqrtdk.engines._engine import Cell as Cell
from sqrtdk.engines._engine import Engine as Engine
from sqrtdk.engines._engine import local_engine
from sqrtdk.engines._pool import pool
from sqrtdk.engines._ray import ray
from sqrtdk.errors import InvalidValueError
from sqrtdk.messages import Message, joined

ENGINES: dict[str, Callable[[int | None, str | None], AbstractContextManager[Engine]]] = {
    "local": local_engine,
    "pool": pool,
    "ray": ray,
}


def open_engine(
    name: str, workers: int | None = None, address: str | None = None, packages: tuple[str, ...] = ()
) -> AbstractContextManager[Engine]:
    """Open an engine; leaving the context ends what it started.

    Args:
        name: "local" (this process), "pool" (processes of this machine) or "ray" (a cluster; needs the extra `ray`).
        workers: cells computed at once; None: one for each CPU. "local" has one.
        address: address of a Ray cluster, "host:port" or "auto"; None: start one on this machine.
        packages: packages beside this one whose code computes the cells; the workers of a cluster need the same.

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
            Message("errors.options.engine", names=joined([*ENGINES], "comma"), name=repr(name)),
            hint=Message("errors.hint.near", names=repr(near[0])) if near else Message("errors.hint.pool"),
        )
    if workers is not None and workers < 1:
        raise InvalidValueError(
            Message("errors.options.workers", workers=str(workers)), hint=Message("errors.hint.one_a_cpu")
        )
    if address is not None and name != "ray":
        raise InvalidValueError(
            Message("errors.options.address", address=repr(address), engine=repr(name)),
            hint=Message("errors.hint.take_ray"),
        )
    return ray(workers, address, packages) if name == "ray" else ENGINES[name](workers, address)

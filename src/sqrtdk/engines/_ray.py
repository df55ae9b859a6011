"""The engine `ray`: tasks of a Ray cluster, or of a Ray that is started on this machine and ended afterwards."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from sqrtdk import _extras
from sqrtdk._environment import numbers_from
from sqrtdk.engines._engine import CELLS_A_WORKER, RETRIES, Cell, Engine, Failure, Result, compute, failed, failure
from sqrtdk.engines._pool import cpus
from sqrtdk.errors import LabError, kind_and_text

_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # otherwise Ray reports its use over the network
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # otherwise each task gives a FutureWarning
}
_OBJECT_STORE_BYTES = 100 * 2**20  # results are small; by default Ray reserves a third of the memory
_KNOCK_S = 5.0
_CONNECT_S = 40.0
_WORKER_S = 120.0  # a worker imports torch, perhaps from a slow disk


class Ray:
    """The engine "ray": a Ray cluster, with one task for each cell."""

    def __init__(self, module: Any, workers: int, ahead: int) -> None:
        self.workers = workers
        self._ray, self._ahead = module, ahead
        self._task = module.remote(num_cpus=1, max_retries=RETRIES)(compute)

    def results(self, function: Callable[[Cell], Result], items: Iterable[Cell]) -> Iterator[tuple[int, Result]]:
        """Yield the index and the result of each cell as soon as it is ready, in any order.

        Ray itself moves the cell of a process that was killed to another one.

        Raises:
            LabError: A cell failed.
        """
        flying: dict[Any, tuple[int, Cell]] = {}
        waiting = enumerate(items)
        try:
            while True:
                while len(flying) < self._ahead and (entry := next(waiting, None)) is not None:
                    flying[self._task.remote(function, entry[1])] = entry
                if not flying:
                    return
                for reference in self._ray.wait(list(flying), num_returns=1)[0]:
                    index, cell = flying.pop(reference)
                    yield index, self._result(reference, cell)
        finally:
            if self._ray.is_initialized():  # otherwise its processes have ended, and cancel would start a new Ray
                for reference in flying:
                    self._ray.cancel(reference, force=True)

    def _result(self, reference: Any, cell: Cell) -> Any:
        try:
            outcome = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:  # its workers died too often, or the cell can't be pickled
            raise failed(cell, failure(error)) from error
        if isinstance(outcome, Failure):
            raise failed(cell, outcome)
        return outcome


def ray(
    workers: int | None = None, address: str | None = None, packages: tuple[str, ...] = ()
) -> contextlib.AbstractContextManager[Engine]:
    """Return an engine on a Ray cluster.

    Args:
        workers: CPUs of the Ray that is started here, or the maximum of cells at once on a cluster; None: all CPUs.
        address: address of a cluster, "host:port" or "auto"; None: the Ray of this process if it has one, otherwise a
            new one.
        packages: packages beside this one whose code computes the cells: workers need the same.

    Raises:
        MissingExtraError: at once, if ray is not installed.
        LabError: on entering: no Ray at the address, or workers of other versions than this process.
    """
    return _opened(_extras.load_extra("ray", extra="ray"), workers, address, packages)


@contextlib.contextmanager
def _opened(module: Any, workers: int | None, address: str | None, packages: tuple[str, ...]) -> Iterator[Engine]:
    """Connect to a cluster, yield its engine, and disconnect unless the caller was connected before."""
    ours = not module.is_initialized()
    if ours:
        _connect(module, workers, address)
    elif address is not None:
        raise LabError(
            f"this process is connected to a Ray already; got the address {address}",
            hint="Leave the address out, or call ray.shutdown() first.",
        )
    try:
        if address is not None or not ours:  # otherwise its workers run this Python with these modules
            _check_workers(module, packages)
        there = max(1, int(module.cluster_resources().get("CPU", 1)))
        count = min(workers or there, there)
        yield Ray(module, count, count if count < there else CELLS_A_WORKER * count)
    finally:
        if ours:
            module.shutdown()


def _check_workers(module: Any, packages: tuple[str, ...]) -> None:
    """Check that a worker of each node with CPUs has this process's versions; nodes that join later are not checked."""
    task = module.remote(num_cpus=0, max_retries=RETRIES)(_worker_versions)
    near = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
    there = [node for node in module.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in there}
    asked = {node: task.options(scheduling_strategy=near(node, soft=True)).remote(*packages) for node in nodes}
    here = _worker_versions(*packages)
    for node, reference in asked.items():
        try:
            theirs = module.get(reference, timeout=_WORKER_S)
        except module.exceptions.RayError as error:
            raise LabError(
                f"the workers of the Ray cluster at {nodes[node]} can't run sqrtdk: {kind_and_text(error)}",
                hint=f"Install sqrtdk {here['sqrtdk']} there, and Python and torch as here.",
            ) from error
        names = [name for name in here | theirs if theirs.get(name) != here.get(name)]
        if names:
            other = "; ".join(f"{name} {theirs.get(name)} there and {here.get(name)} here" for name in names)
            raise LabError(
                f"the workers of the Ray cluster at {nodes[node]} would give other numbers: {other}",
                hint="Install the same versions in both places, or take the engine 'pool'.",
            )


def _worker_versions(*packages: str) -> dict[str, str]:
    return dict(numbers_from(*packages))


def _connect(module: Any, workers: int | None, address: str | None) -> None:
    settings: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    with _environment():
        if address is None:  # its workers import the modules that this process can, as those of a pool do
            os.environ["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, sys.path))
            settings |= {"num_cpus": workers or cpus(), "num_gpus": 0, "include_dashboard": False}
            settings |= {"object_store_memory": _OBJECT_STORE_BYTES}
        else:
            _check(address)
        try:
            module.init(address=address or "local", **settings)
        except (Exception, SystemExit) as error:
            what = "no Ray could be started here" if address is None else f"no Ray cluster answers at {address}"
            raise LabError(f"{what}: {kind_and_text(error)}", hint=_NO_RAY_HINT) from error


_NO_RAY_HINT = "Start one with `ray start --head`, which prints its address, or take the engine 'pool'."


def _check(address: str) -> None:
    """Try the address in another process: Ray ends its process if something other than a Ray answers, after minutes."""
    # A plain connection first, because it fails within seconds, and ray.init only after minutes.
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "/" not in host:
        try:
            socket.create_connection((host, int(port)), _KNOCK_S).close()
        except (OSError, OverflowError) as error:
            raise LabError(f"no Ray cluster answers at {address}: {kind_and_text(error)}", hint=_NO_RAY_HINT) from error
    code = f"import ray, sys; ray.init(sys.argv[1], logging_level={logging.ERROR}, log_to_driver=False)"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, address],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_CONNECT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise LabError(f"no Ray cluster answers at {address} within {_CONNECT_S:.0f} s", hint=_NO_RAY_HINT) from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise LabError(f"no Ray cluster answers at {address}: {lines[-1]}", hint=_NO_RAY_HINT)


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in (*_ENVIRONMENT, "PYTHONPATH")}
    os.environ.update(_ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

"""Times configurations of the Triton kernels on the GPU that is here, and prints the table to paste.

Each key of `sqrtdk/impl/gpu/configs.py` that this GPU serves is timed with every candidate below: the median of ten
calls, forward and causal, with and without statistics, then the backward pass. What stands in the table is among the
candidates. One that does not compile or does not fit is told, not timed.

    python benchmarks/gpu_configs.py [--length 4096] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

KINDS = {"half": torch.bfloat16, "single": torch.float32}
BATCH, HEADS, TURNS = 2, 16, 10
# Rows x keys, warps, stages; each with descriptors and without where the GPU has them.
FORWARD = (
    (64, 32, 4, 2),
    (64, 64, 4, 2),
    (64, 64, 4, 3),
    (128, 32, 4, 2),
    (128, 64, 4, 2),
    (128, 64, 8, 2),
    (128, 64, 8, 3),
    (128, 128, 8, 2),
)
BACKWARD = ((64, 32, 4, 2), (64, 64, 4, 2), (128, 32, 8, 2), (128, 64, 8, 2), (128, 64, 8, 1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--json", type=Path, help="write all times to this file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("Error: configurations are timed on a GPU, and torch sees none here", file=sys.stderr)
        return 2
    from sqrtdk.impl.gpu import configs, launch

    target = configs.nearest(launch.target_of(torch.empty(1, device="cuda")))
    times: list[dict[str, Any]] = []
    print(f"# {torch.cuda.get_device_name()}: {target}; length {options.length}, batch {BATCH}, {HEADS} heads")
    for kind, dtype in KINDS.items():
        for width in configs.WIDTHS:
            key = (target, kind, width)
            best = [fastest(key, dtype, options.length, *which, times) for which in variants()]
            print(f"    {key!r}: Forward(\n        " + ",\n        ".join(map(str, best)) + "\n    ),")
            pair = [fastest_backward(key, dtype, options.length, i, times) for i in (0, 1)]
            print(f"    # backward\n    {key!r}: Backward(" + ", ".join(map(str, pair)) + "),", flush=True)
    if options.json:
        options.json.write_text(json.dumps(times, indent=1) + "\n")
    return 0


def variants() -> tuple[tuple[bool, bool], ...]:
    """(causal, statistics) in the order of `configs.Forward`."""
    return ((False, False), (True, False), (False, True), (True, True))


def candidates(table: tuple[tuple[int, int, int, int], ...], target: str, standing: Any) -> Iterator[Any]:
    """Configurations to time, the standing one first."""
    from sqrtdk.impl.gpu.configs import Config

    yield standing
    for sizes in table:
        for descriptors in (False, True) if target in ("sm_90", "sm_100") else (False,):
            if Config(*sizes, descriptors) != standing:
                yield Config(*sizes, descriptors)


@contextmanager
def replaced(table: dict[Any, Any], key: Any, value: Any) -> Iterator[None]:
    """The entry replaced for a while."""
    before = table[key]
    table[key] = value
    try:
        yield
    finally:
        table[key] = before


def tensors(dtype: torch.dtype, length: int, width: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(BATCH, HEADS, length, width, dtype=dtype, device="cuda") for _ in range(3))


def fastest(
    key: tuple[str, str, int], dtype: torch.dtype, length: int, causal: bool, wanted: bool, times: list[dict[str, Any]]
) -> Any:
    """The fastest configuration of the forward kernel."""
    from sqrtdk.impl.gpu import configs, operators
    from sqrtdk.impl.gpu.wanted import BITS, bits_of

    query, keys, value = tensors(dtype, length, key[2])
    bound = 0 if causal else None

    def call() -> None:
        operators.forward(
            *(query, keys, value, key[2] ** -0.5, None, 0.0, None, None, None),
            *(bound, None, None, bits_of(BITS) if wanted else 0),
        )

    timed = {}
    for config in candidates(FORWARD, key[0], configs.FORWARD[key][causal + 2 * wanted]):
        with replaced(configs.FORWARD, key, configs.Forward(*[config] * 4)):
            timed[config] = _note(times, key, f"forward causal={causal} statistics={wanted}", config, call)
    return min(timed, key=timed.__getitem__)


def fastest_backward(
    key: tuple[str, str, int], dtype: torch.dtype, length: int, which: int, times: list[dict[str, Any]]
) -> Any:
    """The fastest configuration of the kernel of keys (0) or rows (1), the other as it stands."""
    from sqrtdk.impl.gpu import configs, gradients

    query, keys, value = tensors(dtype, length, key[2])
    row = torch.zeros(BATCH, HEADS, length, device="cuda")

    def call() -> None:
        gradients.backward(
            *(value, query, keys, value, row, row, None, key[2] ** -0.5, None, 0.0, None, None),
            *(0, None, False, False),
        )

    timed = {}
    standing = configs.BACKWARD[key]
    for config in candidates(BACKWARD, key[0], standing[which]):
        pair = configs.Backward(*(config if i == which else standing[i] for i in (0, 1)))
        with replaced(configs.BACKWARD, key, pair):
            timed[config] = _note(times, key, f"backward {standing._fields[which]}", config, call)
    return min(timed, key=timed.__getitem__)


def _note(times: list[dict[str, Any]], key: Any, name: str, config: Any, call: Callable[[], None]) -> float:
    """Median seconds of a call, noted; infinite where it can't be made."""
    from triton.runtime.errors import OutOfResources, PTXASError

    try:
        seconds = _median(call)
        said = f"{seconds * 1e3:.3f} ms"
    except (OutOfResources, PTXASError) as error:
        seconds, said = float("inf"), f"not timed: {str(error).splitlines()[0]}"
    times.append({"key": key, "kernel": name, "config": str(config), "seconds": None if said[0] == "n" else seconds})
    print(f"# {key} {name} {config}: {said}", file=sys.stderr, flush=True)
    return seconds


def _median(call: Callable[[], None]) -> float:
    for _ in range(3):
        call()
    found = []
    for _ in range(TURNS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
    return statistics.median(found)


if __name__ == "__main__":
    sys.exit(main())

"""Trace files as other engines write them, by the writer that docs/en/trace-file.md prints."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from sqrtdk.masks.band import band_mask
from sqrtdk.tracing.tensors import CallTensors
from sqrtdk.tracing.trace import Trace

PAGE = (Path(__file__).parents[2] / "docs" / "en" / "trace-file.md").read_text(encoding="utf-8")
SPACE: dict[str, Any] = {}
exec(re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[0], SPACE)
write_trace = SPACE["write_trace"]
NAMES = {"q": "query", "k": "key", "v": "value"}


def plain(tensor: Tensor) -> Any:
    """As numpy has it, which knows no bfloat16."""
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def calls_of(model: nn.Module, given: dict[str, Tensor]) -> tuple[CallTensors, ...]:
    with torch.no_grad(), Trace(model, stats=False, numeric=False, keep=True) as run:
        model(**given)
    return run.tensors


def written(model: nn.Module, given: dict[str, Tensor], path: Path, **more: Any) -> Path:
    """A file of what a hook sees: q, k, v, the output; `more` is in every call."""
    calls = [
        {
            "site": call.site,
            "dtype": call.dtype,
            "output": plain(call.output),
            **{letter: plain(getattr(call, name).values) for letter, name in NAMES.items()},
            **more,
        }
        for call in calls_of(model, given)
    ]
    write_trace(path, calls, writer="a hook")
    return path


def hooked(calls: Sequence[CallTensors], path: Path, groups: int, layout: str, rows: int | None = None) -> Path:
    """A file of an engine that has the heads of k and v once each, a layout of its own, and may keep few rows."""
    found = []
    for call in calls:
        first = slice(None, None, call.query.values.shape[1] // groups)
        every = call.query.values.shape[2]
        tensors = {"q": call.query.values[:, :, :rows], "output": call.output[:, :, :rows]}
        for letter, vector in (("k", call.key), ("v", call.value)):
            tensors[letter] = vector.values if vector.values.shape[1] == groups else vector.values[:, first]
        one: dict[str, Any] = {"site": call.site, "layout": layout, "dtype": call.dtype}
        one |= {letter: plain(laid_out(tensor, layout)) for letter, tensor in tensors.items()}
        if rows is not None:
            one["cut"] = {"rows": rows, "rows_of": every}
        found.append(one)
    write_trace(path, found, writer="an engine")
    return path


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """(B, H, L, E) in another layout."""
    tensor = tensor.transpose(1, 2) if layout.endswith("LHE") else tensor
    return tensor if layout.startswith("B") else tensor[0]


@dataclass(frozen=True)
class Engine:
    """An attention by hand, of a prefill: the last `rows` of `keys` tokens, lower-right causal.

    Attributes:
        scale: None is by the root of the head's width.
        softcap: None is none.
        least: least i - j of a visible key, both counted from the last; None hides no later key.
        greatest: greatest i - j.
        padding: how many of the last keys of each sequence are none.
        sinks: None is none.
        turn: heads of q read those of k in turn, and not in groups.
    """

    scale: float | None = None
    softcap: float | None = None
    least: int | None = 0
    greatest: int | None = None
    padding: tuple[int, ...] = ()
    sinks: tuple[float, ...] = ()
    turn: bool = False


@dataclass(frozen=True)
class Sizes:
    batch: int = 1
    heads: int = 8
    groups: int = 2
    rows: int = 64
    keys: int = 64
    width: int = 32
    dtype: torch.dtype = field(default=torch.float32)


def vectors(sizes: Sizes, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = (sizes.heads, sizes.rows), (sizes.groups, sizes.keys), (sizes.groups, sizes.keys)
    q, k, v = (torch.randn(sizes.batch, *shape, sizes.width, generator=draw).to(sizes.dtype) for shape in shapes)
    return q, k, v


def run(engine: Engine, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Output, of q's dtype, and lse without sinks."""
    count, groups, rows, keys = q.shape[1], k.shape[1], q.shape[2], k.shape[2]
    heads = torch.arange(count) % groups if engine.turn else torch.arange(count) // (count // groups)
    z = q.double() @ k.double()[:, heads].mT * (engine.scale or q.shape[-1] ** -0.5)
    z = z if engine.softcap is None else engine.softcap * (z / engine.softcap).tanh()
    corner = rows - keys
    bounds = [None if bound is None else bound + corner for bound in (engine.least, engine.greatest)]
    visible = band_mask(rows, keys, *bounds).expand(len(q), 1, rows, keys).clone()
    for entry, count_of in enumerate(engine.padding):
        visible[entry, :, :, keys - count_of :] = False
    z = z.masked_fill(~visible, -torch.inf)
    lse = z.logsumexp(-1)
    sinks = torch.tensor(engine.sinks, dtype=torch.float64)[:, None]
    total = torch.logaddexp(lse, sinks.expand(lse.shape)) if engine.sinks else lse
    weights = (z - total[..., None]).exp().nan_to_num()
    return (weights @ v.double()[:, heads]).to(q.dtype), lse.float()


def engine_file(
    path: Path, layers: Sequence[tuple[Engine, tuple[Tensor, Tensor, Tensor]]], *, lse: bool = False, **more: Any
) -> Path:
    """A file of some layers, each with its vectors, in (B, L, H, E)."""
    calls = []
    for number, (engine, parts) in enumerate(layers):
        output, sums = run(engine, *parts)
        call: dict[str, Any] = {"site": f"layers.{number}.attn", "layout": "BLHE", **more}
        call["dtype"] = str(output.dtype).removeprefix("torch.")
        tensors = zip(("q", "k", "v", "output"), (*parts, output), strict=True)
        call |= {name: numpy.ascontiguousarray(plain(tensor.transpose(1, 2))) for name, tensor in tensors}
        calls.append(call | ({"lse": plain(sums)} if lse else {}))
    write_trace(path, calls, writer="an engine")
    return path

"""Tensors of calls, of any layout that a trace file has a form for, made from seeds; and attention computed of them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from sqrtdk.tracing.tensors import CallTensors, Projection, Term, Vector, Waypoint

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
ODD = (math.inf, -math.inf, math.nan, -0.0)
MASKS = ("causal", "lower right", "window", "left padding", "right padding", "random", "none", "all", "rows", "one row")


def numbers(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32, odd: bool = False) -> Tensor:
    """Normal numbers; `odd` puts an infinity, NaN or -0 among them."""
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    if odd and values.numel():
        values.view(-1)[0] = ODD[int(torch.randint(len(ODD), (), generator=generator))]
    return values.to(dtype)


def mask(kind: str, generator: torch.Generator, batch: int, heads: int, rows: int, keys: int) -> Tensor:
    """A mask that broadcasts to (B, Hq, L, S)."""
    whole = torch.ones(batch, 1, rows, keys, dtype=torch.bool)
    if kind == "causal":
        return whole[:1].tril()
    if kind == "lower right":
        return whole[:1].tril(keys - rows)
    if kind == "window":
        return whole[0].tril().triu(-2)
    if kind in ("left padding", "right padding"):
        length = torch.randint(0, keys + 1, (batch, 1, 1, 1), generator=generator)
        tokens = torch.arange(keys) >= length if kind == "left padding" else torch.arange(keys) < length
        return whole.tril() & tokens
    if kind == "random":
        return torch.rand(batch, heads, rows, keys, generator=generator) > 0.5
    if kind == "rows":
        return torch.rand(batch, 1, rows, 1, generator=generator) > 0.5
    if kind == "one row":
        return torch.rand(keys, generator=generator)[None] > 0.5
    return whole if kind == "all" else ~whole


@st.composite
def calls(draw: Any, index: int = 0) -> CallTensors:
    """Any call that the format has a form for."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    batch, groups, heads = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    rows, keys = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    width, out = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    dtype, odd = draw(st.sampled_from(DTYPES)), draw(st.booleans())
    name = str(dtype).removeprefix("torch.")

    def vector(count: int, length: int, features: int) -> Vector:
        shape = (batch, count, length, features)
        factor = draw(st.sampled_from((1.0, 1, 0.5, math.inf, math.nan, None)))
        steps = tuple(
            Waypoint(kind, draw(st.sampled_from(("rms", "", "é\x1b"))), draw(st.sampled_from((None, True))))
            for kind in draw(st.lists(st.sampled_from(("norm", "rope", "unknown")), max_size=2))
        )
        projection = None
        if draw(st.booleans()):
            weight = numbers(generator, count, features, 4, dtype=dtype) if draw(st.booleans()) else None
            projection = Projection(
                draw(st.sampled_from(("", "q.weight"))),
                numbers(generator, batch, length, 4, dtype=dtype),
                weight,
                numbers(generator, count, features) if draw(st.booleans()) else None,
                torch.randperm(count * features, generator=generator).reshape(count, features),
            )
        return Vector(
            numbers(generator, *shape, dtype=dtype, odd=odd),
            numbers(generator, count, 1, 1, dtype=torch.float64) if factor is None else factor,
            numbers(generator, *shape, dtype=dtype) if draw(st.booleans()) else None,
            tuple(
                dataclasses.replace(step, values=numbers(generator, *shape, dtype=dtype) if step.values else None)
                for step in steps
            ),
            projection,
        )

    hq = groups * heads
    fill, added = draw(st.sampled_from((-math.inf, -1e9, math.nan))), draw(st.booleans())
    terms = st.sampled_from(
        (
            Term("scale", 0.125, "number"),
            Term("scale", numbers(generator, hq, 1, 1, dtype=torch.float64)),
            Term("scale", torch.tensor(0.5)),
            Term("softcap", 50.0),
            Term("softcap", None),
            Term("bias", numbers(generator, 1, hq, rows, keys, dtype=torch.bfloat16, odd=odd), "alibi"),
            Term("sinks", numbers(generator, hq)),
            Term("unknown", None, "hardtanh"),
            Term("mask", None, "window"),
            *(Term("mask", mask(kind, generator, batch, hq, rows, keys), kind, fill, added) for kind in MASKS),
        )
    )
    return CallTensors(
        site=draw(st.sampled_from(("", "layers.0.attn", "sitio\n\x1b[31m‮"))),
        index=index,
        query=vector(hq, rows, width),
        key=vector(groups, keys, width),
        value=vector(groups, keys, out),
        output=numbers(generator, batch, hq, rows, out, dtype=dtype, odd=odd),
        terms=draw(st.none() | st.lists(terms, max_size=5).map(tuple)),
        lse=numbers(generator, batch, hq, rows, odd=odd) if draw(st.booleans()) else None,
        kept=mask("random", generator, batch, hq, rows, keys) if draw(st.booleans()) else None,
        dropout=draw(st.sampled_from((0.0, 0.1))),
        dtype=name,
        logits_dtype=draw(st.sampled_from(("float32", "float64", "bfloat16"))),
        weights_dtype=draw(st.sampled_from(("float32", name))),
        missing=draw(st.sampled_from((None, "a mixing of the heads is not known"))),
    )


def unlike(a: Any, b: Any, place: str = "call") -> list[str]:
    """Where two calls differ: in a type, a shape, a dtype, a bit."""
    if type(a) is not type(b):
        return [f"{place}: {type(a).__name__}, {type(b).__name__}"]
    if isinstance(a, Tensor):
        like = a.dtype == b.dtype and a.shape == b.shape
        bits = [x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
        return [] if like and torch.equal(*bits) else [f"{place}: {a.dtype} {tuple(a.shape)}"]
    if dataclasses.is_dataclass(a):
        names = [field.name for field in dataclasses.fields(a) if field.name != "lines"]  # which no file holds
        return [found for name in names for found in unlike(getattr(a, name), getattr(b, name), f"{place}.{name}")]
    if isinstance(a, tuple):
        if len(a) != len(b):
            return [f"{place}: {len(a)}, {len(b)}"]
        return [found for at, both in enumerate(zip(a, b, strict=True)) for found in unlike(*both, f"{place}[{at}]")]
    return [] if a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b)) else [f"{place}: {a!r}, {b!r}"]


def computed(call: CallTensors) -> tuple[Tensor, Tensor]:
    """Output and lse of a call whose terms are scales, biases, masks and sinks, in float64."""
    q, k, v = (part.values.double() for part in (call.query, call.key, call.value))
    repeat = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeat, 1) for x in (k, v))
    logits, sinks = q @ k.mT, None
    for term in call.terms or ():
        if term.name == "scale":
            logits = logits * term.value
        elif term.name == "bias":
            logits = logits + term.value
        elif term.name == "mask":
            logits = logits.masked_fill(~term.value, -math.inf)
        elif term.name == "sinks":
            sinks = term.value
    lse = logits.logsumexp(-1)
    below = lse if sinks is None else torch.logaddexp(lse, sinks[:, None].double())
    return (logits - below[..., None]).exp().nan_to_num() @ v, lse

"""Golden cases of every way to write an attention: blocks of keys, edges, heads that meet, products, layouts.

Each way runs with data, and, where the numbers of its code are known without it, on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sqrtdk.tracing import Trace
from tests.attentions import blocks, edges, heads, layouts, products, scores, written
from tests.trace import blocks_by_hand, test_trace_blocks, test_trace_edges, test_trace_online
from tests.trace.test_trace_products import run as run_product
from tests.trace.told import counted, told, without_empty


def in_short(run: Trace) -> dict[str, Any]:
    """Of a run without data: what can differ from the run with data."""
    calls = [[call.formula, call.scale.effective, list(call.unknown), call.batch, call.heads] for call in run.calls]
    return without_empty(told(run) | {"calls": counted(calls)})


def _blocks(name: str, scale: float, device: str) -> Trace:
    scales = (blocks_by_hand.ROOT, scale, blocks_by_hand.ROOT)
    return blocks_by_hand.traced(blocks_by_hand.online(name, scales, hide=blocks.WAYS[name].masks), device)[0]


def _edges(model: Callable[[], torch.nn.Module], device: str) -> Trace:
    torch.manual_seed(0)
    x, index = torch.randn(edges.N, edges.WIDTH), edges.edges()
    return test_trace_edges.run_of(model().to(device), x.to(device), index.to(device))


def _product(attend: products.Attend, device: str) -> Trace:
    torch.manual_seed(0)
    return run_product(attend, device=device)


EDGES: dict[str, Callable[[], torch.nn.Module]] = {
    **{
        f"{total.__name__}, {largest.__name__ if largest else 'no maximum'}": (
            lambda total=total, largest=largest: edges.EdgeAttention(total=total, largest=largest)
        )
        for total in edges.SUMS.values()
        for largest in (*edges.MAXIMA.values(), None)
    },
    **{name: lambda row=row: edges.EdgeAttention(row[0]) for name, row in test_trace_edges.LOGITS.items()},
    **{
        f"{kind.__name__}, {name}": lambda kind=kind, activation=activation: kind(activation)
        for kind in (edges.Gat, edges.Gat2)
        for name, activation in test_trace_edges.ACTIVATIONS.items()
    },
    "after the sum": edges.AfterTheSum,
    **{
        softmax.__name__: lambda softmax=softmax: test_trace_edges.InWords(softmax)
        for softmax in (test_trace_edges.as_logarithm, test_trace_edges.by_gathering, test_trace_edges.by_rows)
    },
}
HEADS: dict[str, heads.Attend] = {
    **{f"mixed, {name}": row[0] for name, row in heads.MIXED.items()},
    **{f"after, {name}": heads.weighed(row[0]) for name, row in heads.AFTER.items()},
    **{f"combined, {name}": row[0] for name, row in heads.COMBINED.items()},
    "heads last": heads.heads_last,
    "mixed and masked": heads.mixed_and_masked,
    "mixed and capped": heads.capped,
    **{f"written, {name}": row[0] for name, row in written.WRITTEN.items()},
}
PRODUCTS: dict[str, products.Attend] = {
    **products.WHOLE,
    **products.SINGLE,
    **{name: row[0] for table in (products.AXIAL, products.ONE_QUERY, products.WINDOWS) for name, row in table.items()},
    **{f"distance, {name}": row[0] for name, row in scores.DISTANCES.items()},
    **{f"additive, {name}": row[0] for name, row in scores.ADDITIVE.items()},
    **{name: row[0] for name, row in scores.CHANNELS.items()},
}
SIDE_BY_SIDE = {**test_trace_blocks.WRITTEN, **test_trace_online.AROUND}
# name -> the trace of a way on a device
WRITTEN: dict[str, Callable[[str], Trace]] = {
    **{
        f"blocks: {name}{', unlike' * (scale == 1)}": lambda at, name=name, scale=scale: _blocks(name, scale, at)
        for name in blocks.WAYS
        for scale in (blocks_by_hand.ROOT, 1.0)
    },
    **{
        f"blocks: {name}": lambda at, attend=attend: blocks_by_hand.traced(attend, at)[0]
        for name, (attend, _) in SIDE_BY_SIDE.items()
    },
    **{f"edges: {name}": lambda at, model=model: _edges(model, at) for name, model in EDGES.items()},
    **{f"heads: {name}": lambda at, attend=attend: heads.trace(attend, at)[2] for name, attend in HEADS.items()},
    **{f"products: {name}": lambda at, attend=attend: _product(attend, at) for name, attend in PRODUCTS.items()},
    **{f"layouts: {name}": lambda at, name=name: layouts.traced(name, at) for name in layouts.LAID},
}
# Without data: of an einsum of three operands the number is not known, indices of edges are not either.
WITH_DATA = ("products: three_operands", "edges: ", "products: tensordot_of_heads")

CASES: dict[str, Callable[[], dict[str, Any]]] = {
    **{name: lambda way=way: without_empty(told(way("cpu"))) for name, way in WRITTEN.items()},
    **{
        f"{name}, without data": lambda way=way: in_short(way("meta"))
        for name, way in WRITTEN.items()
        if not name.startswith(WITH_DATA)
    },
}

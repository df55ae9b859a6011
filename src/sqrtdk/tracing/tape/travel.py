"""Tensors that travel between ranks while a model runs: which attentions are a part of a row of all ranks.

The recorder sees the collectives of torch.distributed as operations, and notes the nodes of the tensors that they bring
and the roots of those that they take along. An attention is part of a row in four cases:

    k = torch.cat(all_gather(k), 2)                 # q, k or v comes out of a collective: its rows or keys are unknown
    dist.isend(k, after); dist.irecv(k_, before)    # what comes of q, k or v goes to another rank
    attend(q, k, v), attend(q, k_, v_)              # one q meets the keys of several ranks, as in a ring
    all_gather(logits.logsumexp(-1))                # its sums of exponentials are joined with those of other ranks

Sums over all ranks (all-reduce, as behind tensor-parallel projections) and broadcasts split no row and do not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from sqrtdk.messages import Message
from sqrtdk.tracing.records import AttentionCall, PartOfRow
from sqrtdk.tracing.tape.graph import ancestors
from sqrtdk.tracing.tape.node import Node
from sqrtdk.tracing.tape.store import NodeStore

NAMESPACES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional"})
_WAIT = "wait_tensor"  # of a functional collective: its result is that of the collective
_REDUCTIONS = ("reduce", "broadcast", "barrier")  # beginnings of names, behind "all" and "_"
_BROUGHT = ("output", "outputs", "output_tensor", "output_tensors")
_OF_THE_LSE = ("logsumexp", "logaddexp", "sum")
_LEAST_DIMS = 3  # of q, k and v; the flat parameters that FSDP gathers have one


@dataclass(frozen=True, slots=True)
class Journey:
    """Where the vectors of an attention come from.

    Attributes:
        roots: Serial numbers of the roots of q and of k, None if there is no single one.
        sources: Serial numbers of the roots of q, k and v.
        came: Whether q, k or v comes out of a collective.
        query_came: Whether q does, so that its rows or heads are not those of this rank's tokens.
        logits: Serial numbers of the products whose logits are the attention's.
    """

    roots: tuple[int | None, int | None]
    sources: frozenset[int]
    came: bool
    query_came: bool = False
    logits: frozenset[int] = frozenset()

    @staticmethod
    def of_all(blocks: Iterable[Journey]) -> Journey:
        """Return the journey of one attention over several blocks of keys, from those of the blocks.

        The roots are those of the first block; the sources are those of all.
        """
        every = list(blocks)
        sources = frozenset().union(*(block.sources for block in every))
        logits = frozenset().union(*(block.logits for block in every))
        came, query_came = any(block.came for block in every), any(block.query_came for block in every)
        return Journey(every[0].roots, sources, came, query_came, logits)


@dataclass(slots=True, eq=False)
class Travel:
    """What collectives did in a trace.

    Attributes:
        count: Number of collectives that ran.
        arrived: Nodes of the tensors that came from other ranks.
        passed: Serial numbers of the roots of the tensors that went to other ranks.
        shared_sums: Serial numbers of the products of which a sum of exponentials, or its logarithm, went there.
    """

    count: int = 0
    arrived: WeakSet[Node] = field(default_factory=WeakSet)
    passed: set[int] = field(default_factory=set)
    shared_sums: set[int] = field(default_factory=set)

    def note(self, store: NodeStore, name: str, named: dict[str, Any], output: Any) -> None:
        """Note a collective operation that has run, and where the tensors go that it takes and brings.

        Args:
            store: the nodes.
            name: name of the operation without namespace.
            named: its arguments by the names of its schema.
            output: what it returned.
        """
        if name == _WAIT:
            if any(node in self.arrived for tensor in tensors_in(named.values()) for node in store.holding(tensor)):
                self._arrive(store, [output])
            return
        self.count += 1
        for node in (node for tensor in tensors_in(named.values()) for node in store.holding(tensor)):
            if node.products and any(above.op in _OF_THE_LSE for above in ancestors(node) if above.products):
                self.shared_sums.update(product.serial for product in node.products)
        if name.lstrip("_").removeprefix("all").lstrip("_").startswith(_REDUCTIONS):
            return
        receives = name.startswith("recv")
        brought = [value for key, value in named.items() if receives or key in _BROUGHT]
        for tensor in tensors_in(value for key, value in named.items() if not receives and key not in _BROUGHT):
            self.passed.update(root.serial for node in store.holding(tensor) for root in node.roots)
        self._arrive(store, [*brought, output])

    def _arrive(self, store: NodeStore, values: Iterable[Any]) -> None:
        for tensor in tensors_in(values):
            # Other ranks made it: for this one a lineage starts here, as with an input.
            if tensor.is_floating_point() and tensor.dim() >= _LEAST_DIMS:
                store.new_root("input", tensor)
            self.arrived.update(store.holding(tensor))

    def came(self, nodes: Iterable[Node]) -> bool:
        """Return whether one of the nodes comes out of a collective, without a projection or other root in between."""
        queue, known = list(nodes) if len(self.arrived) else [], set[Node]()
        while queue:
            node = queue.pop()
            if node in known:
                continue
            if node in self.arrived:
                return True
            known.add(node)
            queue += [] if node.is_root else node.parents()
        return False

    def journey(
        self, nodes: Sequence[Node], query: Node | None, key: Node | None, value: Node | None, logits: Node | None
    ) -> Journey:
        """Return the journey of an attention.

        Args:
            nodes: The nodes of q, k and v, or of their logits.
            query: The root of q, if there is a single one.
            key: The same of k.
            value: The node of v, if it is known.
            logits: What stands for the logits of an attention that is one operation.
        """
        serials = None if query is None else query.serial, None if key is None else key.serial
        sources = {root.serial for root in (() if value is None else value.roots)}
        sources.update(serial for serial in serials if serial is not None)
        products = frozenset({logits} if logits is not None else ()).union(*(node.products for node in nodes))
        came = self.came(nodes)
        query_came = came and (query is None or self.came([query]))
        return Journey(serials, frozenset(sources), came, query_came, frozenset(each.serial for each in products))

    def goes(self, journey: Journey) -> bool:
        """Return whether q, k or v of an attention comes from another rank, or went to one."""
        return journey.came or bool(journey.sources & self.passed)

    def without_parts(self, records: Sequence[tuple[AttentionCall, Journey]]) -> list[tuple[AttentionCall, bool]]:
        """Return the calls of a trace, without the statistics of those that see only a part of a row.

        Such a row is spread over several ranks; the record says so in place of its statistics.

        Args:
            records: each call with its journey.

        Returns:
            Each call, and whether the rows that this rank measured are rows of its own tokens over all of their keys
            after all: a ring that ended in one output, or keys that were gathered first. They are not if q comes out
            of a collective, if it also meets keys in another call, or if a sum of exponentials goes to other ranks.
        """
        shares = [bool(journey.logits & self.shared_sums) for _, journey in records]
        away = [self.goes(journey) for _, journey in records]
        queries = [(call.site, journey.roots[0]) for call, journey in records]
        calls, apart = Counter(queries), {query for query, goes in zip(queries, away, strict=True) if goes}
        found = []
        for (call, journey), query, goes, share in zip(records, queries, away, shares, strict=True):
            several = query in apart and query[1] is not None and calls[query] > 1
            how: PartOfRow | None = "passed" if several else "summed" if share else "gathered" if goes else None
            apart_here = several or share or (goes and (query[1] is None or journey.query_came))
            found.append((call if how is None else _part_of_row(call, how), not apart_here))
        return found


def _part_of_row(call: AttentionCall, how: PartOfRow) -> AttentionCall:
    nothing: Any = dict.fromkeys(("stats", "future_weight", "padding_seen", "tokens_hidden"))
    return replace(call, stats_reason=Message(f"trace.part_of_row.{how}"), part_of_row=how, **nothing)


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among arguments, also those in nested lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def world_size() -> int:
    """Return the number of ranks of the default process group; 1 if torch.distributed is not initialised."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1

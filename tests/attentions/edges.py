"""Graph attention: one logit an edge and head, a softmax over the edges of each node, by every way of scattering."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

N, H, E = 12, 4, 8
WIDTH = H * E
ROOT = E**-0.5


def edges(nodes: int = N, seed: int = 0) -> Tensor:
    """Source and destination of every edge; each node has between one and four, its own among them."""
    rng = torch.Generator().manual_seed(seed)
    pairs = [(int(j), i) for i in range(nodes) for j in {i, *torch.randint(nodes, (3,), generator=rng).tolist()}]
    return torch.tensor(pairs).T


def zeros(like: Tensor, nodes: int) -> Tensor:
    return like.new_zeros((nodes, *like.shape[1:]))


def rows(like: Tensor, index: Tensor) -> Tensor:
    return index.view(-1, *(1,) * (like.dim() - 1)).expand_as(like)


# -- sums and maxima of the edges of each node -------------------------------------------------------------------------


def scatter_add(x: Tensor, index: Tensor, nodes: int) -> Tensor:
    return zeros(x, nodes).scatter_add_(0, rows(x, index), x)


def scatter_reduce(x: Tensor, index: Tensor, nodes: int) -> Tensor:
    return zeros(x, nodes).scatter_reduce(0, rows(x, index), x, "sum")


def index_add(x: Tensor, index: Tensor, nodes: int) -> Tensor:
    return zeros(x, nodes).index_add(0, index, x)


def index_put(x: Tensor, index: Tensor, nodes: int) -> Tensor:
    return zeros(x, nodes).index_put_((index,), x, accumulate=True)


def segments(x: Tensor, index: Tensor, nodes: int) -> Tensor:
    return torch.segment_reduce(x, "sum", lengths=torch.bincount(index, minlength=nodes), axis=0)


def scatter_maximum(z: Tensor, index: Tensor, nodes: int) -> Tensor:
    return zeros(z, nodes).scatter_reduce_(0, rows(z, index), z.detach(), "amax", include_self=False)


def index_maximum(z: Tensor, index: Tensor, nodes: int) -> Tensor:
    return torch.full_like(zeros(z, nodes), -1e9).index_reduce_(0, index, z.detach(), "amax")


def segment_maximum(z: Tensor, index: Tensor, nodes: int) -> Tensor:
    return torch.segment_reduce(z.detach(), "max", lengths=torch.bincount(index, minlength=nodes), axis=0)


Grouped = Callable[[Tensor, Tensor, int], Tensor]
SUMS: dict[str, Grouped] = {f.__name__: f for f in (scatter_add, scatter_reduce, index_add, index_put, segments)}
MAXIMA: dict[str, Grouped] = {f.__name__: f for f in (scatter_maximum, index_maximum, segment_maximum)}


def edge_softmax(
    z: Tensor, index: Tensor, nodes: int, total: Grouped = scatter_add, largest: Grouped | None = scatter_maximum
) -> Tensor:
    """exp(z - the node's largest) over its sum for the node, plus a guard."""
    if largest is not None:
        z = z - largest(z, index, nodes).index_select(0, index)
    z = z.exp()
    return z / (total(z, index, nodes) + 1e-16).index_select(0, index)


class EdgeAttention(nn.Module):
    """q of an edge's destination, k and v of its source, per head; `logits` makes z of (q, k), both (edges, H, E)."""

    def __init__(
        self,
        logits: Callable[[Tensor, Tensor], Tensor] = lambda q, k: (q * k).sum(-1) * ROOT,
        total: Grouped = scatter_add,
        largest: Grouped | None = scatter_maximum,
        heads: int = H,
    ) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, heads * E) for _ in range(3))
        self.logits, self.total, self.largest, self.heads = logits, total, largest, heads

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        q, k, v = (part(x).view(-1, self.heads, E) for part in (self.q, self.k, self.v))
        z = self.logits(q[target], k[source])
        weights = edge_softmax(z, target, len(x), self.total, self.largest)
        message = v[source] * weights.view(-1, self.heads, 1)
        return self.total(message, target, len(x)).flatten(1)


class AfterTheSum(EdgeAttention):
    """The values are summed first, and the sum of the exponentials divides them afterwards (SAN, GraphGPS)."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        q, k, v = (part(x).view(-1, self.heads, E) for part in (self.q, self.k, self.v))
        score = self.logits(q[target], k[source]).clamp(-50, 50).exp().unsqueeze(-1)
        summed = self.total(v[source] * score, target, len(x))
        return (summed / (self.total(score, target, len(x)) + 1e-6)).flatten(1)


class Gat(nn.Module):
    """Additive: a_s . Wx_j + a_t . Wx_i through an activation (Velickovic et al. 2018, arXiv:1710.10903)."""

    def __init__(self, activation: Callable[[Tensor], Tensor] = functional.leaky_relu, *, two: bool = False) -> None:
        super().__init__()
        self.source, self.target = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH) if two else None
        self.a_source, self.a_target = (nn.Parameter(torch.randn(1, H, E)) for _ in range(2))
        self.activation = activation

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        values = self.source(x).view(-1, H, E)
        queries = values if self.target is None else self.target(x).view(-1, H, E)
        z = (values * self.a_source).sum(-1)[source] + (queries * self.a_target).sum(-1)[target]
        weights = edge_softmax(self.activation(z), target, len(x))
        return scatter_add(values[source] * weights[..., None], target, len(x)).flatten(1)


class Gat2(Gat):
    """a . act(Wx_i + Wx_j) (Brody et al. 2022, arXiv:2105.14491)."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        values = self.source(x).view(-1, H, E)
        queries = values if self.target is None else self.target(x).view(-1, H, E)
        z = (self.activation(queries[target] + values[source]) * self.a_source).sum(-1)
        weights = edge_softmax(z, target, len(x))
        return scatter_add(values[source] * weights[..., None], target, len(x)).flatten(1)


class Pooling(nn.Module):
    """A gate a node, a softmax over the nodes of each graph, one sum a graph: no query, no attention."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.v = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, graph: Tensor) -> Tensor:
        weights = edge_softmax(self.gate(x), graph, int(graph.max()) + 1)
        return scatter_add(weights * self.v(x), graph, int(graph.max()) + 1)


@torch.library.custom_op("sqrtdk_edges::softmax_csr", mutates_args=())
def softmax_csr(z: Tensor, ends: Tensor, dim: int) -> Tensor:
    """A stand-in for PyTorch Geometric's softmax of sorted edges."""
    return torch.cat([part.softmax(dim) for part in z.split(ends.diff().tolist())])

"""Graph attention is read by its edges: by every way of scattering, with its scale, and additive scores by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sqrtdk
from sqrtdk.tracing import AttentionCall, Trace
from tests.attentions.each import each
from tests.attentions.edges import (
    MAXIMA,
    ROOT,
    SUMS,
    WIDTH,
    AfterTheSum,
    E,
    EdgeAttention,
    Gat,
    Gat2,
    Grouped,
    H,
    N,
    Pooling,
    edge_softmax,
    edges,
    scatter_add,
    scatter_maximum,
    softmax_csr,
)
from tests.tolerances import allowed

pytestmark = pytest.mark.filterwarnings("ignore:index_reduce:UserWarning", "ignore:Sparse:UserWarning")
SLOPE = allowed(torch.float32, length=E, logit=10.0, magnitude=1.0)


def run_of(model: nn.Module, *inputs: Tensor) -> Trace:
    """One run, its output bit-equal to the run without a trace."""
    inputs = inputs or (torch.randn(N, WIDTH), edges())
    with torch.no_grad():
        plain = model(*inputs)
        with sqrtdk.trace(model) as run:
            observed = model(*inputs)
    assert plain.is_meta or torch.equal(plain, observed)
    assert run.not_measured == ()
    return run


def read(model: nn.Module, *inputs: Tensor) -> AttentionCall:
    run = run_of(model, *inputs)
    assert run.not_attention == ()
    (call,) = run.calls
    return call


def check_product(call: AttentionCall, scale: float = ROOT) -> None:
    assert (call.kind, call.score, call.unknown) == ("edge softmax", "dot", ())
    assert (call.heads, call.kv_heads, call.head_dim, call.query_len, call.key_len) == (H, H, E, N, N)
    assert call.scale.effective == pytest.approx(scale)
    assert (call.stats is None) == (call.device == "meta" or call.stats_reason is not None)
    if call.device == "cpu":
        assert call.scale.numeric == pytest.approx(scale, rel=SLOPE)
        assert call.scale.agree is True


# -- q . k on the edges ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("total", SUMS.values(), ids=list(SUMS))
def test_every_sum_over_the_edges_of_a_node_is_one(total: Grouped) -> None:
    call = read(EdgeAttention(total=total))
    check_product(call)
    assert call.formula == "softmax(0.3536 * q.k)"


@pytest.mark.parametrize("largest", [*MAXIMA.values(), None], ids=[*MAXIMA, "none"])
def test_the_largest_logit_of_a_node_changes_nothing(largest: Grouped | None) -> None:
    check_product(read(EdgeAttention(largest=largest)))


LOGITS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], float, str]] = {
    "right": (lambda q, k: (q * k).sum(-1) * ROOT, ROOT, "softmax(0.3536 * q.k)"),
    "divided": (lambda q, k: (q * k).sum(dim=-1) / E**0.5, ROOT, "softmax(0.3536 * q.k)"),
    "before the sum": (lambda q, k: (q * k / E**0.5).sum(-1), ROOT, "softmax(0.3536 * q.k)"),
    "on q": (lambda q, k: ((q * ROOT) * k).sum(-1), ROOT, "softmax(0.3536 * q.k)"),
    "kept axis": (lambda q, k: (q * k).sum(-1, keepdim=True) * ROOT, ROOT, "softmax(0.3536 * q.k)"),
    "einsum": (lambda q, k: torch.einsum("ehd,ehd->eh", q, k) * ROOT, ROOT, "softmax(0.3536 * q.k)"),
    "matmul": (lambda q, k: (q[..., None, :] @ k[..., None])[..., 0, 0] * ROOT, ROOT, "softmax(0.3536 * q.k)"),
    "missing": (lambda q, k: (q * k).sum(-1), 1.0, "softmax(q.k)"),
    "twice": (lambda q, k: (q * k).sum(-1) * ROOT / E**0.5, 1 / E, "softmax(0.125 * q.k)"),
    "doubled": (lambda q, k: (q * k).sum(-1) * 2 * ROOT, 2 * ROOT, "softmax(0.7071 * q.k)"),
    "cap": (lambda q, k: 5 * torch.tanh((q * k).sum(-1) * ROOT / 5), ROOT, "softmax(5 * tanh(0.3536 * q.k / 5))"),
    "bias": (
        lambda q, k: (q * k).sum(-1).mul(ROOT) + torch.linspace(0, 1, len(q), device=q.device)[:, None],
        ROOT,
        "softmax(0.3536 * q.k + bias)",
    ),
}


@each("device", ["cpu", "meta"])
@pytest.mark.parametrize("way", LOGITS)
def test_the_scale_on_the_edges_is_read(way: str, device: str) -> None:
    logits, scale, formula = LOGITS[way]
    call = read(EdgeAttention(logits).to(device), torch.randn(N, WIDTH, device=device), edges().to(device))
    check_product(call, scale)
    assert call.formula == formula


def test_the_values_may_be_summed_before_the_division() -> None:
    check_product(read(AfterTheSum()))


def test_weights_in_a_sparse_matrix_are_the_same_attention() -> None:
    class Sparse(EdgeAttention):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            source, target = edge_index
            q, k, v = (part(x) for part in (self.q, self.k, self.v))
            weights = edge_softmax((q[target] * k[source]).sum(-1) * WIDTH**-0.5, target, len(x))
            return torch.sparse_coo_tensor(torch.stack([target, source]), weights, (N, N)) @ v

    call = read(Sparse())
    assert (call.kind, call.heads, call.head_dim) == ("edge softmax", 1, WIDTH)
    assert call.scale.effective == pytest.approx(WIDTH**-0.5)
    assert call.scale.agree is True


def as_logarithm(z: Tensor, index: Tensor, nodes: int) -> Tensor:
    most = scatter_maximum(z, index, nodes)
    total = scatter_add((z - most[index]).exp(), index, nodes)
    return (z - (total.log() + most)[index]).exp()


def by_gathering(z: Tensor, index: Tensor, nodes: int) -> Tensor:
    place = index[:, None].expand_as(z)
    z = (z - scatter_maximum(z, index, nodes).gather(0, place)).exp()
    return z / scatter_add(z, index, nodes).gather(0, place)


def by_rows(z: Tensor, index: Tensor, nodes: int) -> Tensor:
    return softmax_csr(z, torch.cat([index.new_zeros(1), torch.bincount(index, minlength=nodes).cumsum(0)]), 0)


class InWords(EdgeAttention):
    """The softmax in other words."""

    def __init__(self, softmax: Callable[[Tensor, Tensor, int], Tensor], scale: float = ROOT) -> None:
        super().__init__()
        self.softmax, self.scale = softmax, scale

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        q, k, v = (part(x).view(-1, H, E) for part in (self.q, self.k, self.v))
        weights = self.softmax((q[target] * k[source]).sum(-1) * self.scale, target, len(x))
        return scatter_add(v[source] * weights[..., None], target, len(x)).flatten(1)


@each("scale", [ROOT, 1.0])
@each("softmax", [as_logarithm, by_gathering, by_rows])
def test_the_softmax_of_edges_may_be_written_in_other_words(
    softmax: Callable[[Tensor, Tensor, int], Tensor], scale: float
) -> None:
    call = read(InWords(softmax, scale))
    check_product(call, scale)
    assert call.formula == ("softmax(0.3536 * q.k)" if scale == ROOT else "softmax(q.k)")


def test_a_softmax_over_the_edges_of_other_nodes_is_named() -> None:
    class Crossed(EdgeAttention):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            source, target = edge_index
            q, k, v = (part(x).view(-1, H, E) for part in (self.q, self.k, self.v))
            weights = edge_softmax((q[target] * k[source]).sum(-1) * ROOT, source, len(x))
            return scatter_add(v[source] * weights[..., None], target, len(x)).flatten(1)

    call = read(Crossed())
    assert call.faults == ("other_nodes",)
    assert call.scale.effective is None


def test_queries_and_keys_of_other_nodes_are_counted_apart() -> None:
    """Bipartite: 5 nodes attend to 12."""

    class Bipartite(EdgeAttention):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            source, target = edge_index
            q = self.q(x[:5]).view(-1, H, E)
            k, v = (part(x).view(-1, H, E) for part in (self.k, self.v))
            weights = edge_softmax((q[target] * k[source]).sum(-1) * ROOT, target, 5)
            return scatter_add(v[source] * weights[..., None], target, 5)

    source, target = edges()
    call = read(Bipartite(), torch.randn(N, WIDTH), torch.stack([source, target % 5]))
    assert (call.query_len, call.key_len, call.scale.effective) == (5, N, pytest.approx(ROOT))


def test_one_projection_for_queries_and_keys_is_a_product_too() -> None:
    class Shared(EdgeAttention):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            source, target = edge_index
            h = self.q(x).view(-1, H, E)
            weights = edge_softmax((h[target] * h[source]).sum(-1) * ROOT, target, len(x))
            return scatter_add(h[source] * weights[..., None], target, len(x)).flatten(1)

    call = read(Shared())
    check_product(call)
    assert call.self_attention is True


class Prior(EdgeAttention):
    """A learned number for each head, and one for each kind of edge (HGT)."""

    def __init__(self, kinds: int) -> None:
        super().__init__(self.with_prior)
        self.prior, self.kinds = nn.Parameter(torch.rand(kinds, H) + 0.5), kinds

    def with_prior(self, q: Tensor, k: Tensor) -> Tensor:
        each = torch.cat([row.expand(part, -1) for row, part in zip(self.prior, self.parts(len(q)), strict=True)])
        return (q * k).sum(-1) * each / E**0.5

    def parts(self, count: int) -> list[int]:
        return [count] if self.kinds == 1 else [20, count - 20]


def test_a_learned_number_a_head_is_read_and_one_a_kind_of_edge_is_named() -> None:
    one, several = Prior(1), Prior(2)
    call = read(one)
    assert call.scale.per_head == pytest.approx([ROOT * p for p in one.prior[0].tolist()])
    assert call.scale.agree is True
    call = read(several)
    assert [factor.text() for factor in call.scale.factors] == ["? (parameter prior)", "0.3536"]
    assert (call.scale.effective, call.scale.symbolic) == (None, None)


def test_a_gate_of_the_data_on_the_edges_is_no_factor() -> None:
    call = read(EdgeAttention(lambda q, k: (q * k).sum(-1) * ROOT * torch.sigmoid(k[..., 0])))
    assert call.unknown == ("unknown(mul)",)
    assert call.scale.effective is None


@each("largest", [None, scatter_maximum])
def test_the_statistics_are_those_of_each_nodes_edges(largest: Grouped | None) -> None:
    """Against rows in float64, node by node; a node with one edge has no choice, and counts for nothing."""
    model, x, edge_index = EdgeAttention(largest=largest), torch.randn(N, WIDTH), edges()
    edge_index = torch.cat([edge_index, torch.tensor([[0], [N]])], 1)
    x = torch.cat([x, torch.randn(1, WIDTH)])
    stats = read(model, x, edge_index).stats
    assert stats is not None
    q, k = (part(x).detach().double().view(-1, H, E) for part in (model.q, model.k))
    z = (q[edge_index[1]] * k[edge_index[0]]).sum(-1) * ROOT
    rows = [z[edge_index[1] == node] for node in range(N)]
    rows = [row for row in rows if len(row) > 1]
    entropy = torch.stack([-(row.softmax(0) * row.log_softmax(0)).sum(0) for row in rows]).mean(0)
    close = allowed(torch.float32, length=E, logit=10.0, magnitude=10.0)
    assert stats.rows == len(rows)
    assert stats.max_logit == pytest.approx(torch.cat(rows).amax(0).tolist(), abs=close)
    assert stats.entropy_nats == pytest.approx(entropy.tolist(), abs=close)
    assert stats.blind_rows == (0,) * H


# -- additive ----------------------------------------------------------------------------------------------------------

ACTIVATIONS = {
    f.__name__: f
    for f in (functional.leaky_relu, torch.relu, torch.tanh, functional.elu, functional.gelu, functional.silu)
} | {"none": lambda z: z}


@each("two", [False, True])
@pytest.mark.parametrize(
    ("kind", "activation"),
    [(kind, name) for kind in (Gat, Gat2) for name in ACTIVATIONS if kind is Gat or name != "none"],
)
def test_graph_attention_is_additive_whatever_its_activation(kind: type[Gat], activation: str, two: bool) -> None:
    call = read(kind(ACTIVATIONS[activation], two=two))
    assert (call.score, call.formula, call.unknown) == ("additive", "softmax(additive(q, k))", ())
    assert (call.kind, call.heads) == ("edge softmax", H)
    assert call.scale.effective is None
    assert "additive" in (call.scale.reason or "")


def test_features_side_by_side_are_additive() -> None:
    """The first graph attention multiplied [Wx_i, Wx_j] by one vector."""

    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.a = nn.Linear(WIDTH, E), nn.Linear(2 * E, 1)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            source, target = edge_index
            h = self.w(x)
            z = functional.leaky_relu(self.a(torch.cat([h[target], h[source]], -1)))
            return scatter_add(edge_softmax(z, target, len(x)) * h[source], target, len(x))

    assert read(Beside()).score == "additive"


def test_a_dense_softmax_over_products_of_rows_is_not_read() -> None:
    """The edges of one group, by a plain softmax."""

    class One(EdgeAttention):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            source, target = edge_index
            weights = (self.q(x)[target] * self.k(x)[source]).sum(-1).softmax(-1)
            return weights @ self.v(x)[source]

    call = read(One())
    assert call.unknown == ("unknown(mul)",)
    assert call.scale.effective is None


# -- what is none ------------------------------------------------------------------------------------------------------


def test_a_pooling_over_the_nodes_of_a_graph_is_no_attention() -> None:
    run = run_of(Pooling(), torch.randn(N, WIDTH), torch.arange(N) // 4)
    assert run.calls == ()
    assert [other.reason for other in run.not_attention] == [
        "edge softmax: its logits come from one projection: a router or a pooling"
    ]


def test_a_softmax_of_sparse_values_is_named() -> None:
    class Sparse(EdgeAttention):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            source, target = edge_index
            z = (self.q(x)[target] * self.k(x)[source]).sum(-1)
            matrix = torch.sparse_coo_tensor(torch.stack([target, source]), z, (N, N)).coalesce()
            return torch.sparse.mm(torch.sparse.softmax(matrix, 1), self.v(x))

    model = Sparse()
    with torch.no_grad(), sqrtdk.trace(model) as run:
        model(torch.randn(N, WIDTH), edges())
    assert run.calls == ()
    assert ["sparse" in missed.reason for missed in run.not_measured] == [True]


def test_edge_attention_beside_another_attention_is_told_too() -> None:
    class Gps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.local, self.wide = EdgeAttention(), nn.MultiheadAttention(WIDTH, H, batch_first=True)
            self.gat = Gat()

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.local(x, edge_index) + self.wide(x[None], x[None], x[None])[0][0] + self.gat(x, edge_index)

    calls = run_of(Gps()).calls
    assert [(call.site, call.score) for call in calls] == [("local", "dot"), ("wide", "dot"), ("gat", "additive")]


@each("kind", [EdgeAttention, AfterTheSum, Gat, Gat2])
def test_an_edge_attention_that_is_trained_is_read_alike(kind: type[nn.Module]) -> None:
    model, x = kind(), torch.randn(N, WIDTH, requires_grad=True)
    with sqrtdk.trace(model) as run:
        model(x, edges()).sum().backward()
    assert [call.formula for call in run.calls] == [read(model).formula]
    assert run.not_attention == run.not_measured == ()

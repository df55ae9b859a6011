"""Every score against float64 loops over single pairs of vectors, in all dtypes, head counts and leading dimensions.

Tolerances are derived: the oracle also sums the magnitudes of what a score is made of, and a result may err by the
roundings of that sum in the dtype that computes it, plus those of the few steps that are stored in the input's dtype.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from sqrtdk import scales, scores
from sqrtdk.scores import FoldedScore, PairScore
from tests.tolerances import gradient_complaints, half_complaint

HEADS, KEY_HEADS, L, S, E, EK, A = 4, 2, 3, 5, 6, 7, 8
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
Pair = tuple[float, float]  # score, and the sum of magnitudes in it


@dataclass(frozen=True)
class Case:
    """A score, what it says of one pair in float64, and how many steps it stores in the input's dtype."""

    score: FoldedScore | PairScore
    pair: Callable[[Tensor, Tensor, int, int], Pair]  # q, k, query head, key head
    key_dim: int = E
    stored: int = 0


def dotted(q: Tensor, k: Tensor) -> Pair:
    return sum(a * b for a, b in zip(q.tolist(), k.tolist(), strict=True)), (q.abs() @ k.abs()).item()


def bent(x: Tensor, size: Tensor, v: Tensor) -> Pair:
    return (v @ x.tanh()).item(), (v.abs() @ (1 + size)).item()


def unit_of(norm: str, x: Tensor) -> Tensor:
    if norm == "l2":
        return x / sum(a * a for a in x.tolist()) ** 0.5
    centred = x - x.mean() if norm == "layer" else x
    return centred / ((centred @ centred / len(x)) + {"rms": 1e-6, "layer": 1e-5}[norm]) ** 0.5


def cosine_case(norm: str, gain: object, factor: Callable[[int], Tensor | float]) -> Case:
    score = scores.cosine(norm, gain)  # type: ignore[arg-type]
    return Case(score, lambda q, k, h, _: dotted(unit_of(norm, q) * factor(h), unit_of(norm, k)), stored=2)


def bilinear_case(make: Callable[[Tensor], FoldedScore], w: Tensor) -> Case:
    wide = w.detach().double()

    def pair(q: Tensor, k: Tensor, h: int, _: int) -> Pair:
        part = wide[h] if wide.ndim == 3 else wide
        terms = [[q[a] * part[a, b] * k[b] for b in range(EK)] for a in range(E)]
        flat = torch.stack([x for row in terms for x in row])
        return flat.sum().item(), flat.abs().sum().item()

    return Case(make(w), pair, EK, stored=1)


def additive_case(v: Tensor, wq: Tensor, wk: Tensor, bias: Tensor | None) -> Case:
    def of(t: Tensor, h: int, shared: int) -> Tensor:
        wide = t.detach().double()
        return wide[h] if wide.ndim > shared else wide

    def pair(q: Tensor, k: Tensor, h: int, kh: int) -> Pair:
        b = torch.zeros(A, dtype=torch.float64) if bias is None else of(bias, h, 1)
        qw, kw = of(wq, h, 2), of(wk, kh, 2)
        x = torch.stack([sum(q[e] * qw[e, a] for e in range(E)) + b[a] for a in range(A)])
        x = x + torch.stack([sum(k[e] * kw[e, a] for e in range(EK)) for a in range(A)])
        return bent(x, q.abs() @ qw.abs() + k.abs() @ kw.abs() + b.abs(), of(v, h, 1))

    return Case(scores.additive(v, wq, wk, bias), pair, EK, stored=2)


def concat_case(v: Tensor, w: Tensor) -> Case:
    wide, vector = w.detach().double(), v.detach().double()

    def pair(q: Tensor, k: Tensor, h: int, _: int) -> Pair:
        joined = torch.cat([q, k])
        return bent(joined @ wide, joined.abs() @ wide.abs(), vector[h] if vector.ndim == 2 else vector)

    return Case(scores.luong_concat(v, w), pair, EK, stored=2)


def keras_case(v: Tensor | None) -> Case:
    def pair(q: Tensor, k: Tensor, h: int, _: int) -> Pair:
        part = torch.ones(E, dtype=torch.float64) if v is None else v.detach().double()
        return bent(q + k, q.abs() + k.abs(), part[h] if part.ndim == 2 else part)

    return Case(scores.keras_additive(v), pair)


def distance_pair(q: Tensor, k: Tensor, _: int, __: int) -> Pair:
    found = sum((a - b) ** 2 for a, b in zip(q.tolist(), k.tolist(), strict=True))
    return -found, found


def laplace_pair(q: Tensor, k: Tensor, _: int, __: int) -> Pair:
    found = sum(abs(a - b) for a, b in zip(q.tolist(), k.tolist(), strict=True))
    return -found, found


def of_head(t: Tensor) -> Callable[[int], Tensor]:
    return lambda h: t.detach().double().flatten()[h]


# of a function that makes weights of a size
Make = Callable[..., nn.Parameter]
CASES: dict[str, Callable[[Make], Case]] = {
    "dot": lambda w: Case(scores.dot(), lambda q, k, h, kh: dotted(q, k)),
    "cosine": lambda w: cosine_case("l2", None, lambda h: 1.0),
    "cosine number": lambda w: cosine_case("l2", 7.5, lambda h: 7.5),
    "cosine heads": lambda w: cosine_case("l2", t := w(HEADS), of_head(t)),
    "cosine features": lambda w: cosine_case("rms", t := w(HEADS, 1, E), lambda h: t.detach().double()[h, 0]),
    "cosine module": lambda w: cosine_case("l2", scores.LearnedGain(HEADS, 20.0, dtype=w(1).dtype), lambda h: 20.0),
    "cosine rms": lambda w: cosine_case("rms", None, lambda h: 1.0),
    "cosine layer": lambda w: cosine_case("layer", t := w(1), lambda h: t.detach().double()),
    "bilinear": lambda w: bilinear_case(scores.bilinear, w(E, EK)),
    "bilinear heads": lambda w: bilinear_case(scores.bilinear, w(HEADS, E, EK)),
    "luong_general": lambda w: bilinear_case(scores.luong_general, w(E, EK)),
    "additive": lambda w: additive_case(w(A), w(E, A), w(EK, A), None),
    "additive bias": lambda w: additive_case(w(A), w(E, A), w(EK, A), w(A)),
    "additive heads": lambda w: additive_case(w(HEADS, A), w(HEADS, E, A), w(KEY_HEADS, EK, A), w(HEADS, A)),
    "additive mixed": lambda w: additive_case(w(HEADS, A), w(E, A), w(KEY_HEADS, EK, A), None),
    "keras_additive": lambda w: keras_case(w(E)),
    "keras_additive heads": lambda w: keras_case(w(HEADS, E)),
    "keras_additive plain": lambda w: keras_case(None),
    "luong_concat": lambda w: concat_case(w(A), w(E + EK, A)),
    "luong_concat heads": lambda w: concat_case(w(HEADS, A), w(E + EK, A)),
    "distance": lambda w: Case(scores.distance(), distance_pair),
    "rbf": lambda w: Case(scores.rbf(0.5), distance_pair),
    "laplace": lambda w: Case(scores.laplace(), laplace_pair),
}
NAMES = tuple(CASES)


def build(name: str, dtype: torch.dtype) -> Case:
    """The case, with weights of a dtype."""
    return CASES[name](lambda *shape: nn.Parameter(torch.randn(*shape, dtype=torch.float64).to(dtype)))


# one of each path: a compilation takes seconds
COMPILED = ("cosine heads", "cosine module", "bilinear heads", "additive heads", "keras_additive", "luong_concat")
COMPILED += ("cosine rms", "cosine layer", "distance", "laplace")
WITHOUT_HEADS = tuple(n for n in NAMES if n.split()[-1] not in {"heads", "features", "module", "mixed"})


def repeated(key: Tensor, heads: int) -> Tensor:
    return key if key.ndim < 3 else key.repeat_interleave(heads // key.shape[-3], -3)


def scored(score: FoldedScore | PairScore, query: Tensor, key: Tensor) -> Tensor:
    """The scores of all pairs; the product of a folded one is taken in float64, so that only the fold itself errs."""
    heads = query.shape[-3] if query.ndim > 2 else 1
    if isinstance(score, FoldedScore):
        query, key = score.fold(query, key)
        return query.double() @ repeated(key, heads).double().mT
    query, key = score.prepare(query, key)
    return score.pairs(query, repeated(key, heads))


def check(case: Case, query: Tensor, key: Tensor) -> None:
    found = scored(case.score, query, key).detach()
    heads = query.shape[-3] if query.ndim > 2 else 1
    assert found.shape == (*query.shape[:-1], key.shape[-2])
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    if isinstance(case.score, PairScore):
        assert found.dtype == wide
    relative = (E + EK + A + 8) * torch.finfo(wide).eps + case.stored * torch.finfo(query.dtype).eps
    grown = repeated(key, heads)
    for at in itertools.product(*map(range, query.shape[:-2])):
        h = at[-1] if at else 0
        for i, j in itertools.product(range(query.shape[-2]), range(key.shape[-2])):
            expected, size = case.pair(query[at][i].double(), grown[at][j].double(), h, h * KEY_HEADS // HEADS)
            assert abs(found[at][i, j].item() - expected) <= relative * size


@pytest.mark.sampled(10)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_the_oracle(name: str, dtype: torch.dtype) -> None:
    case = build(name, dtype)
    check(case, torch.randn(2, HEADS, L, E).to(dtype), torch.randn(2, KEY_HEADS, S, case.key_dim).to(dtype))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", NAMES)
def test_any_leading_dimensions_and_strides(name: str) -> None:
    case = build(name, torch.float64)
    for lead in ((), (0,), (2, 1)):
        query = torch.randn(*lead, HEADS, L, E, dtype=torch.float64)
        check(case, query, torch.randn(*lead, KEY_HEADS, S, case.key_dim, dtype=torch.float64))
    if name in WITHOUT_HEADS:
        check(case, torch.randn(L, E, dtype=torch.float64), torch.randn(S, case.key_dim, dtype=torch.float64))
    query = torch.randn(2, L, HEADS, E, dtype=torch.float64).transpose(1, 2)
    check(case, query, torch.randn(1, 1, S, case.key_dim, dtype=torch.float64).expand(2, KEY_HEADS, -1, -1))


@pytest.mark.parametrize("name", NAMES)
def test_no_rows_and_no_keys(name: str) -> None:
    case = build(name, torch.float32)
    for rows, keys in ((0, S), (L, 0), (0, 0)):
        query, key = torch.randn(1, HEADS, rows, E), torch.randn(1, KEY_HEADS, keys, case.key_dim)
        assert scored(case.score, query, key).shape == (1, HEADS, rows, keys)


@pytest.mark.parametrize("name", NAMES)
def test_weights_of_float32_serve_half_inputs(name: str) -> None:
    case = build(name, torch.float32)
    query, key = torch.randn(1, HEADS, L, E), torch.randn(1, KEY_HEADS, S, case.key_dim)
    half = scored(case.score, query.bfloat16(), key.bfloat16())
    with torch.no_grad():
        wide = scored(case.score, query, key)
    assert half.isfinite().all()
    # eight bits of a sum of at most E Ek terms, each rounded a few times
    assert (half - wide).abs().max() <= 8 * 2**-8 * E * max(1.0, wide.abs().max().item())


@pytest.mark.parametrize("name", NAMES)
def test_on_meta(name: str) -> None:
    case = build(name, torch.float32)
    score = case.score.to("meta") if isinstance(case.score, nn.Module) else case.score
    query = torch.empty(2, HEADS, L, E, device="meta")
    found = scored(score, query, torch.empty(2, KEY_HEADS, S, case.key_dim, device="meta"))
    assert (found.shape, found.device.type) == ((2, HEADS, L, S), "meta")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_first_and_second_order(name: str) -> None:
    case = build(name, torch.float64)
    query = torch.randn(HEADS, 2, E, dtype=torch.float64, requires_grad=True)
    key = torch.randn(KEY_HEADS, 2, case.key_dim, dtype=torch.float64, requires_grad=True)
    weights = dict(case.score.named_parameters()) if isinstance(case.score, nn.Module) else {}

    def run(q: Tensor, k: Tensor, *values: Tensor) -> Tensor:
        if not weights:
            return scored(case.score, q, k)
        return torch.func.functional_call(_Scored(case.score), _named(weights, values), (q, k))

    inputs = (query, key, *(w.detach().clone().requires_grad_() for w in weights.values()))
    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


class _Scored(nn.Module):
    def __init__(self, score: nn.Module) -> None:
        super().__init__()
        self.score = score

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return scored(self.score, query, key)


def _named(weights: dict[str, Tensor], values: tuple[Tensor, ...]) -> dict[str, Tensor]:
    return {f"score.{name}": value for name, value in zip(weights, values, strict=True)}


@pytest.mark.parametrize("name", NAMES)
def test_transforms_of_torch_func(name: str) -> None:
    case = build(name, torch.float64)
    query = torch.randn(2, HEADS, L, E, dtype=torch.float64)
    key = torch.randn(2, KEY_HEADS, S, case.key_dim, dtype=torch.float64)
    whole = scored(case.score, query, key)
    torch.testing.assert_close(torch.vmap(lambda q, k: scored(case.score, q, k))(query, key), whole)
    rows = torch.vmap(lambda q: scored(case.score, q, key[0]), in_dims=-2, out_dims=-2)(query[0].unsqueeze(-2))
    torch.testing.assert_close(rows.squeeze(-2), whole[0])
    gradient = torch.func.grad(lambda q: scored(case.score, q, key).square().sum())(query)
    leaf = query.clone().requires_grad_()
    scored(case.score, leaf, key).square().sum().backward()
    found, expected = {"query": gradient}, {"query": leaf.grad}
    wrong = gradient_complaints(found, expected, torch.float64, length=max(E, S), logit=20.0, rows=2 * HEADS * L)
    assert not wrong, wrong


@pytest.mark.full
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_without_a_break_for_any_size(name: str) -> None:
    case = build(name, torch.float32)
    query, key = torch.randn(2, HEADS, L, E), torch.randn(2, KEY_HEADS, S, case.key_dim)
    torch.compiler.reset()
    compiled = torch.compile(lambda q, k: scored(case.score, q, k), fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(compiled(query, key), scored(case.score, query, key))


@pytest.mark.parametrize("name", NAMES)
def test_under_autocast(name: str) -> None:
    case = build(name, torch.float32)
    query, key = torch.randn(1, HEADS, L, E), torch.randn(1, KEY_HEADS, S, case.key_dim)
    half_query, half_key = query.bfloat16(), key.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = case.score.fold(half_query, half_key) if isinstance(case.score, FoldedScore) else None
        prepared = case.score.prepare(half_query, half_key) if isinstance(case.score, PairScore) else None
    if found is None or prepared is not None:
        assert {t.dtype for t in prepared or ()} == {torch.float32}
        return
    beside, exact = case.score.fold(half_query, half_key), case.score.fold(half_query.double(), half_key.double())
    for mine, plain, true in zip(found, beside, exact, strict=True):
        assert mine.dtype == torch.bfloat16
        assert half_complaint(mine, true, [plain], torch.bfloat16) is None


def test_default_scales() -> None:
    w = torch.ones(2, 2)
    v = torch.ones(2)
    textbook = (scores.dot(), scores.bilinear(w), scores.cosine("rms"), scores.cosine("layer"))
    plain = (
        scores.cosine(),
        scores.luong_general(w),
        scores.additive(v, w, w),
        scores.keras_additive(),
        scores.luong_concat(v, torch.ones(4, 2)),
        scores.distance(),
    )
    assert {score.default_scale for score in textbook} == {scales.sqrt_dk()}
    assert {score.default_scale for score in plain} == {scales.none()}


def test_every_score_is_of_one_kind() -> None:
    kinds = {name: (isinstance(s, FoldedScore), isinstance(s, PairScore)) for name in NAMES for s in [_score(name)]}
    pairs = {"additive", "keras_additive", "luong_concat", "distance", "rbf", "laplace"}
    assert kinds == {name: (name.split()[0] not in pairs, name.split()[0] in pairs) for name in NAMES}


def _score(name: str) -> FoldedScore | PairScore:
    return build(name, torch.float32).score


def test_the_table_holds_every_score() -> None:
    assert list(scores.SCORES) == [
        "dot",
        "cosine",
        "bilinear",
        "luong_general",
        "additive",
        "keras_additive",
        "luong_concat",
        "distance",
        "rbf",
        "laplace",
    ]
    assert {name.split()[0] for name in NAMES} == set(scores.SCORES)
    for name, make in scores.SCORES.items():
        assert make is getattr(scores, name)


def test_widths() -> None:
    widths = {name: _score(name).width for name in NAMES if isinstance(_score(name), PairScore)}
    assert {width for name, width in widths.items() if name.split()[0] in {"additive", "luong_concat"}} == {A}
    assert {width for name, width in widths.items() if name.split()[0] == "keras_additive"} == {None}
    assert widths["distance"] == 1

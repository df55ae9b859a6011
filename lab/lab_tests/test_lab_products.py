"""Random dot products of the claims about their statistics."""

import math

import pytest
import torch

from sqrtdk_lab import _rows
from sqrtdk_lab._rows import COMPONENTS, dot_products, product_matrices, root_mean_square, standard_pairs
from sqrtdk_lab.claim import ExperimentRun

N = 50_000


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("components", COMPONENTS)
def test_components_have_mean_0_and_variance_1(components: str) -> None:
    values = COMPONENTS[components](rng(), (N, 2)).double()
    kurtosis = {"normal": 3.0, "uniform": 1.8, "signs": 1.0, "Laplace": 6.0}[components]
    assert values.mean().item() == pytest.approx(0.0, abs=5 / math.sqrt(2 * N))
    assert (values**2).mean().item() == pytest.approx(1.0, abs=5 * math.sqrt((kurtosis - 1.0) / (2 * N)) + 1e-9)
    assert (values**4).mean().item() == pytest.approx(kurtosis, rel=0.1)


@pytest.mark.parametrize("shared", [0.0, 0.5, 1.0])
def test_a_share_of_the_components_is_common(shared: float) -> None:
    query, key = standard_pairs("normal", shared)(rng(), N, 2)
    assert (query == key).double().mean().item() == pytest.approx(shared, abs=0.02)


def test_dot_products_of_many_pairs_are_made_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_rows, "COMPONENTS_AT_ONCE", 12)  # three rows of four components
    sizes = []

    def draw(generator: torch.Generator, rows: int, d_k: int) -> tuple[torch.Tensor, torch.Tensor]:
        sizes.append(rows)
        return torch.full((rows, d_k), float(len(sizes))), torch.ones(rows, d_k)

    assert dot_products(rng(), 7, 4, draw).tolist() == [4.0, 4.0, 4.0, 8.0, 8.0, 8.0, 12.0]
    assert sizes == [3, 3, 1]


def test_dot_products_have_the_variance_of_their_dimension() -> None:
    product = dot_products(rng(), N, 16)
    assert product.dtype == torch.float64
    assert (product**2).mean().item() == pytest.approx(16.0, rel=5 * math.sqrt((2.0 + 6.0 / 16) / N))


def test_matrices_are_drawn_afresh_and_have_the_rank_of_their_dimension() -> None:
    first, second = product_matrices(ExperimentRun({}), 2, 6, 2, std=2.0)
    assert not torch.equal(first, second)
    assert torch.linalg.matrix_rank(first) == 2
    (single,) = product_matrices(ExperimentRun({}), 1, 6, 2)
    torch.testing.assert_close(first, 4.0 * single)


def test_root_mean_square_takes_the_root_of_value_and_ends() -> None:
    samples = torch.randn(N, generator=rng(), dtype=torch.float64) * 3.0
    figure = root_mean_square("std", samples, d_k=1)
    assert figure.low < 3.0 < figure.high
    assert figure.high - figure.low == pytest.approx(2 * 2.576 * 3.0 / math.sqrt(2 * N), rel=0.05)
    assert (figure.method, figure.samples, figure.at) == ("t", N, {"d_k": 1})

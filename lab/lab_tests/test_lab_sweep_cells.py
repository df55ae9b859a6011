"""Cells of a sweep against the theory, against formulas written out, and from one process to the next."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from sqrtdk.theory import expected_effective_keys, expected_entropy_nats, expected_jacobian_norm, expected_peak
from sqrtdk_lab.sweep import DISTRIBUTIONS, SWEEP_FIGURES, _cell, measure

BASE = {"d_k": 64, "keys": 64, "scale": "sqrt_dk", "distribution": "normal", "seed": 0, "rows": 256}


def cell(**changes: Any) -> dict[str, Any]:
    return BASE | changes


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_components_have_mean_0_variance_1_and_the_fourth_moment_given(name: str) -> None:
    drawn = DISTRIBUTIONS[name].draw((1000, 1000), torch.Generator().manual_seed(1))
    assert drawn.dtype == torch.float64
    assert drawn.isfinite().all()
    for power, wanted in ((1, 0.0), (2, 1.0), (3, 0.0)):
        values = drawn**power
        assert abs(values.mean().item() - wanted) < 4.5 * values.std().item() / 1000 + 1e-12
    tolerance = 0.25 if name == "student_t" else 0.02  # its fourth power has no variance
    assert (drawn**4).mean().item() == pytest.approx(DISTRIBUTIONS[name].fourth_moment, rel=tolerance)


def test_what_the_distributions_are_called() -> None:
    few = {name: one.draw((4000,), torch.Generator().manual_seed(2)) for name, one in DISTRIBUTIONS.items()}
    assert set(few["rademacher"].tolist()) == {-1.0, 1.0}
    assert 1.7 < few["uniform"].abs().max() <= math.sqrt(3.0)
    assert 0.72 < (few["sparse"] == 0.0).double().mean() < 0.78
    assert few["student_t"].abs().max() > few["normal"].abs().max()


@pytest.mark.parametrize("scale", ["sqrt_dk", "none"])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_standard_deviation_is_sqrt_dk_times_the_scale(name: str, scale: str) -> None:
    found = measure(cell(distribution=name, scale=scale))
    assert found["logit_std_expected"] == pytest.approx(8.0 if scale == "none" else 1.0)
    assert abs(found["logit_std"] - found["logit_std_expected"]) < 4 * found["logit_std_se"]
    assert abs(found["logit_mean"]) < 4 * found["logit_mean_se"]
    assert found["logit_std_se"] < 0.05 * found["logit_std"]


@pytest.mark.parametrize("name", ["normal", "uniform", "rademacher"])
def test_the_excess_kurtosis_falls_with_dk(name: str) -> None:
    for d_k in (2, 8):
        found = measure(cell(distribution=name, d_k=d_k, rows=1024))
        assert abs(found["excess_kurtosis"] - found["excess_kurtosis_expected"]) < 4 * found["excess_kurtosis_se"]
    assert measure(cell(d_k=2))["excess_kurtosis_expected"] == 3.0
    assert measure(cell(d_k=2, distribution="rademacher"))["excess_kurtosis_expected"] == -1.0


@pytest.mark.parametrize(("scale", "sigma"), [("sqrt_dk", 1.0), ("temperature=0.4", 2.5), ("dk", 1 / 16)])
def test_weights_of_a_large_dk_are_those_of_gaussian_logits(scale: str, sigma: float) -> None:
    found = measure(cell(d_k=256, keys=128, rows=256, scale=scale))
    assert found["logit_std_expected"] == pytest.approx(sigma)
    table = 0.005 * math.log(128)  # the interpolation's own error
    for name, expected in (
        ("entropy_nats", expected_entropy_nats(128, sigma)),
        ("peak", expected_peak(128, sigma)),
        ("effective_keys", expected_effective_keys(128, sigma)),
        ("jacobian_norm", expected_jacobian_norm(128, sigma)),
    ):
        assert found[f"{name}_expected"] == expected
        relative = table if name == "entropy_nats" else 0.05 * expected
        assert abs(found[name] - expected) < 4 * found[f"{name}_se"] + relative
    assert found["entropy_share"] == pytest.approx(found["entropy_nats"] / math.log(128))


def test_the_figures_are_what_they_are_called() -> None:
    """Against the formulas written out over the whole matrix, from the same draws."""
    wanted = cell(d_k=8, keys=12, rows=40, scale="fixed=0.9")
    generator = torch.Generator().manual_seed(_cell.stable_seed(wanted))
    q = DISTRIBUTIONS["normal"].draw((40, 8, 1), generator)
    z = 0.9 * (DISTRIBUTIONS["normal"].draw((40, 12, 8), generator) @ q).squeeze(-1)
    p = z.softmax(-1)
    jacobian = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
    centred = z - z.mean()
    found = measure(wanted)
    assert found["scale_factor"] == 0.9
    for name, rows in (
        ("logit_mean", z.mean(-1)),
        ("entropy_nats", -(p * p.log()).sum(-1)),
        ("peak", p.amax(-1)),
        ("effective_keys", 1 / (p**2).sum(-1)),
        ("peak_above_99", (p.amax(-1) > 0.99).double()),
    ):
        assert found[name] == pytest.approx(rows.mean().item(), abs=1e-12)
        assert found[f"{name}_se"] == pytest.approx(rows.std().item() / math.sqrt(40), abs=1e-12)
    assert found["max_abs_logit"] == pytest.approx(z.abs().max().item())
    assert found["logit_std"] == pytest.approx(z.std(correction=0).item())
    assert found["excess_kurtosis"] == pytest.approx(((centred**4).mean() / (centred**2).mean() ** 2 - 3).item())
    assert found["jacobian_norm"] == pytest.approx((jacobian**2).sum((-1, -2)).mean().sqrt().item())


def test_standard_errors_say_how_far_cells_scatter() -> None:
    """Also those by the delta method: over 60 seeds the figures scatter as one cell's errors say."""
    found = [measure(cell(d_k=8, keys=8, rows=128, scale="none", seed=seed)) for seed in range(60)]
    for name in (*SWEEP_FIGURES, "peak_above_99"):
        values = torch.tensor([one[name] for one in found])
        errors = torch.tensor([one[f"{name}_se"] for one in found])
        ratio = (values.std() / errors.square().mean().sqrt()).item()
        assert 0.7 < ratio < (1.8 if name == "excess_kurtosis" else 1.4), f"{name}: {ratio}"


def test_the_rows_in_memory_do_not_change_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = measure(cell())
    monkeypatch.setattr(_cell, "_AT_ONCE", 1)
    row_by_row = measure(cell())
    assert abs(whole["logit_std"] - row_by_row["logit_std"]) < 6 * whole["logit_std_se"]
    assert row_by_row["entropy_nats"] == pytest.approx(whole["entropy_nats"], abs=6 * whole["entropy_nats_se"])


def test_every_part_of_a_cell_changes_its_draws_and_nothing_else_does() -> None:
    base = measure(cell())
    torch.manual_seed(99)
    assert measure(cell()) == base
    assert measure(dict(reversed(BASE.items()))) == base
    for change in ({"seed": 1}, {"rows": 255}, {"keys": 65}, {"d_k": 65}, {"distribution": "uniform"}, {"scale": "dk"}):
        assert measure(cell(**change))["excess_kurtosis"] != base["excess_kurtosis"]


@pytest.mark.full
def test_the_same_numbers_in_another_process() -> None:
    code = f"from sqrtdk_lab.sweep import measure; print(measure({BASE!r}))"
    environment = os.environ | {"PYTHONHASHSEED": "7", "OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == repr(measure(BASE))


def test_a_scale_of_zero_gives_equal_weights() -> None:
    found = measure(cell(scale="fixed=0"))
    assert found["entropy_nats"] == pytest.approx(math.log(64))
    assert found["entropy_nats_expected"] == pytest.approx(math.log(64))
    assert found["logit_std"] == found["max_abs_logit"] == 0.0
    assert math.isnan(found["excess_kurtosis"])
    assert math.isnan(found["excess_kurtosis_expected"])

"""Arms, their best rates, and the differences of heads."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from sqrtdk.messages import Text
from sqrtdk_lab._arms import Arm, best_for_others, beyond, curve_plots, loss_gap, train_arms
from sqrtdk_lab.claim import ClaimPart, Expect, ExperimentRun
from sqrtdk_lab.figures import Figures
from sqrtdk_lab.judge import judge_claim
from sqrtdk_lab.training.models import Decoder, start, weights_of
from sqrtdk_lab.training.settings import TrainingSettings
from sqrtdk_lab.training.train import attention_divergence, head_figures, subspace_overlap, train

DESIGN = {
    "seeds": 3,
    "rates": (1e-3, 4e-3),
    "widened": 0,
    "strings": {"steps": 4, "rows": 2, "length": 8, "points": 3},
    "text": {"steps": 4, "rows": 2, "length": 16, "points": 3},
}


def arm(table):
    """An arm of these held-out losses, by rate and seed."""
    return Arm({rate: tuple({"held_out": loss} for loss in losses) for rate, losses in table.items()}, "decoder")


def test_a_seed_has_no_say_in_its_own_rate():
    # 1e-3 is better on the whole, but only for the sake of the first seed
    table = {1e-3: [0.0, 1.2, 1.2], 3e-3: [1.0, 1.0, 1.0]}
    assert best_for_others(table) == [3e-3, 1e-3, 1e-3]
    assert arm(table).best == [1.0, 1.2, 1.2]
    assert arm(table).rate == 1e-3


def test_a_run_that_diverged_counts_as_a_guess():
    both = arm({1e-3: [None, 2.0, 2.0], 1e-2: [None, None, 9.0]})
    assert both.losses(1e-3) == [math.log(256), 2.0, 2.0]
    assert both.losses(1e-2) == [math.log(256), math.log(256), 9.0]
    assert both.rate == 1e-3


def test_a_gap_between_two_runs_that_diverged_is_no_number():
    lost, other = arm({1e-3: [None, None, None]}), arm({1e-3: [2.0, None, 1.0]})
    found = loss_gap("gap", lost, lost)
    assert all(math.isnan(end) for end in (found.value, found.low, found.high))
    verdict = judge_claim(Figures([found]), [ClaimPart(Text("equal", "相等"), (Expect("gap", -0.1, 0.1),))])
    assert verdict.answer == "undecided"
    assert math.isnan(loss_gap("gap", lost, other).value)
    assert loss_gap("gap", lost, arm({1e-3: [2.0, 2.1, 1.9]})).low > 0.0


def test_a_curve_of_nan_is_not_drawn_as_the_smallest_number():
    names = ("step", "loss", "max_logit", "entropy_share", "gradient_p10", "gradient_p50", "gradient_p90")
    result = {"held_out": 1.0, "curves": {name: [0.0, math.nan, 0.0] for name in names}}
    (largest,) = curve_plots({"one": Arm({1e-3: (result, result)}, "decoder")}, "text", 8)[1].series
    assert largest.y[0] == largest.y[2] == 1e-10
    assert math.isnan(largest.y[1])


def test_gaps_are_paired_by_seed():
    worse, better = arm({1e-3: [1.5, 2.5, 3.5]}), arm({1e-3: [1.0, 2.0, 3.0]})
    found = loss_gap("gap", worse, better, d_k=4)
    assert (found.value, found.low, found.high, found.samples) == (0.5, 0.5, 0.5, 3)
    assert found.at == {"d_k": 4}


@pytest.mark.parametrize(
    ("best", "tried"),
    [
        (1e-3, [3e-4, 1e-3, 3e-3]),
        (2e-4, [9e-5, 3e-4, 1e-3, 3e-3]),
        (1e-6, [3e-5, 9e-5, 3e-4, 1e-3, 3e-3]),
        (1.0, [3e-4, 1e-3, 3e-3, 9e-3, 3e-2]),
    ],
)
def test_rates_are_tried_beyond_an_edge_that_is_best(best, tried):
    asked = []

    def compute(function, cells):
        asked.extend((cell["rate"], cell["seed"]) for cell in cells)
        return [{"held_out": abs(math.log(cell["rate"] / best)), "curves": {}} for cell in cells]

    run = ExperimentRun({**DESIGN, "rates": (3e-4, 1e-3, 3e-3), "widened": 2}, 0, compute)
    found = train_arms(run, {"one": {"task": "strings", "head_dim": 8}})["one"]
    assert list(found.results) == tried
    assert sorted(asked) == sorted((rate, seed) for rate in tried for seed in range(3))
    for rate in tried:
        assert found.losses(rate) == [pytest.approx(abs(math.log(rate / best)))] * 3


def test_an_arm_of_one_rate_keeps_it():
    assert beyond(arm({1e-3: [1.0, 2.0]})) is None


def test_arms_share_seeds_and_other_runs_have_other_seeds():
    asked = []

    def compute(function, cells):
        assert function is train
        asked.append(list(cells))
        return [{"held_out": float(cell["rate"] + cell["seed"]), "curves": {}} for cell in cells]

    arms = {s: {"task": "strings", "head_dim": d, "scale": s} for s, d in (("none", 8), ("sqrt_dk", 64))}
    for seed in (0, 1):
        found = train_arms(ExperimentRun(DESIGN, seed, compute), arms)
        assert found["none"].losses(4e-3) == [pytest.approx(1000 * seed + i + 4e-3) for i in range(3)]
    first, second = ({cell["seed"] for cell in cells} for cells in asked)
    assert first == {0, 1, 2}
    assert not first & second
    assert len(asked[0]) == 2 * 2 * 3
    assert [cell["head_dim"] for cell in asked[0]] == [64] * 6 + [8] * 6  # long ones first
    assert {cell["steps"] for cell in asked[0]} == {4}


def test_arms_of_a_real_run_have_curves_and_plots():
    arms = train_arms(
        ExperimentRun(DESIGN),
        {s: {"task": "text", "head_dim": 8, "scale": s, "width": 16} for s in ("none", "sqrt_dk")},
        {"none": (1e-3,), "sqrt_dk": (4e-3,)},
    )
    assert (arms["none"].rate, arms["sqrt_dk"].rate) == (1e-3, 4e-3)
    assert arms["none"].at_best("step") == [[0, 2, 3]] * 3
    plots = curve_plots(arms, "text", 8)
    assert [plot.name for plot in plots] == ["loss", "max-logit", "entropy", "gradient"]
    for plot in plots:
        for series in plot.series:
            assert series.x == (0.0, 2.0, 3.0)
            assert all(map(math.isfinite, series.y))
    mean = np.mean(arms["none"].at_best("max_logit"), 0)
    assert plots[1].series[0].y == pytest.approx(tuple(mean))
    assert len({series.label for series in plots[3].series}) == 6


def test_divergence_is_that_of_scipy():
    from scipy.spatial.distance import jensenshannon

    first, second = (torch.randn(50, 7, dtype=torch.float64).mul(3).softmax(-1) for _ in range(2))
    expected = jensenshannon(first.numpy(), second.numpy(), axis=-1, base=2) ** 2
    np.testing.assert_allclose(attention_divergence(first, second).numpy(), expected, rtol=1e-9)


def test_overlap_is_the_mean_squared_cosine_of_the_principal_angles():
    from scipy.linalg import subspace_angles

    first, second = torch.randn(2, 5, 12)
    angles = subspace_angles(first.double().mT.numpy(), second.double().mT.numpy())
    assert subspace_overlap(first, second) == pytest.approx(float((np.cos(angles) ** 2).mean()))
    assert subspace_overlap(first, torch.randn(5, 5) @ first) == pytest.approx(1.0, rel=1e-4)


def test_head_figures_look_at_every_pair_of_every_layer():
    settings = TrainingSettings("decoder", head_dim=8, rate=1e-3, seed=0, heads=4, layers=2, width=16, length=16)
    model = Decoder(settings)
    start(model, settings, torch.Generator().manual_seed(0))
    text = torch.randint(256, (2, 16))
    found = head_figures(model, text)
    assert [(f["layer"], f["first"], f["second"]) for f in found] == [
        (layer, i, j) for layer in (0, 1) for i in range(4) for j in range(i + 1, 4)
    ]
    maps = []
    heads = model.layers[0].attention
    heads.heads.register_forward_pre_hook(lambda _, args: maps.append(args[0]))
    model(text)
    weights = heads.heads(maps[0], maps[0], maps[0], is_causal=True, average_attn_weights=False)[1].double()
    expected = attention_divergence(weights[:, 1], weights[:, 3])[:, 1:].mean().item()
    pair = next(f for f in found if (f["layer"], f["first"], f["second"]) == (0, 1, 3))
    assert pair["divergence"] == pytest.approx(expected)
    assert not heads.heads._forward_pre_hooks or len(heads.heads._forward_pre_hooks) == 1  # its own hooks are gone


def test_tied_heads_stay_equal_while_they_train_and_free_ones_do_not():
    settings = TrainingSettings(
        "decoder", head_dim=8, rate=1e-2, seed=0, heads=4, width=16, length=16, steps=6, rows=4, points=0
    )
    free, tied = (train(replace(settings, tied=tied).cell())["heads"] for tied in (False, True))
    assert all(pair["divergence"] > 0.01 for pair in free["end"])
    assert all(pair["divergence"] == 0.0 for pair in tied["end"])
    assert all(pair["query_overlap"] == pytest.approx(1.0) for pair in tied["end"])
    assert train(settings.cell())["held_out"] != train(replace(settings, tied=True).cell())["held_out"]


def test_tied_heads_learn():
    settings = TrainingSettings("decoder", head_dim=8, rate=1e-2, seed=0, heads=2, width=16, tied=True)
    model = Decoder(settings)
    start(model, settings, torch.Generator().manual_seed(0))
    query, _ = weights_of(model.layers[0].attention.heads)
    before = query.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    text = torch.randint(256, (4, 16))
    torch.nn.functional.cross_entropy(model(text).flatten(0, 1), text.flatten()).backward()
    optimizer.step()
    assert not torch.equal(query, before)
    assert torch.equal(query[:8], query[8:])

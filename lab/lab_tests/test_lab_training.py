"""The small models and their trainer: what is trained, that it is trained, and that watching changes nothing."""

import json
import math
import platform
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sqrtdk
from sqrtdk.errors import InvalidValueError, LabError
from sqrtdk.positions import rope
from sqrtdk_lab.training.models import Attention, Decoder, EncoderDecoder, StoredProducts, start, weights_of
from sqrtdk_lab.training.settings import (
    LETTERS,
    START,
    TrainingSettings,
    batch,
    learning_rate,
    letters_in,
    stdlib_text,
    strings,
)
from sqrtdk_lab.training.train import logit_figures, noise_costs, query_gradients, train
from tests.tolerances import allowed

TINY = TrainingSettings(
    "encoder_decoder", head_dim=8, rate=4e-3, seed=3, steps=12, rows=4, length=8, width=16, points=4
)
TINY_TEXT = replace(TINY, model="decoder", length=16)


def without_time(result):
    return {name: value for name, value in result.items() if name != "cpu_s"}


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def new_attention(settings, **options):
    attention = Attention(settings, **options)
    start(attention, settings, rng())
    return attention


def normed(rows, width, seed=1):
    return F.rms_norm(torch.randn(1, rows, width, generator=rng(seed)), (width,))


# What is trained on


def test_text_is_what_the_embedded_model_was_trained_on():
    record = json.loads((Path(sqrtdk.__file__).parent / "models" / "weights" / "demo.json").read_text())
    text, held_out = stdlib_text()
    assert len(held_out) > 100_000
    if platform.python_version() == record["python"]:
        assert len(text) == record["train_bytes"]
        assert sha256(text.numpy().tobytes()).hexdigest() == record["train_sha256"]


def test_a_python_without_sources_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(LabError, match="holds 0 source files"):
        stdlib_text()


def test_directories_above_the_library_do_not_matter(monkeypatch, tmp_path):
    root = tmp_path / "tests" / "lib"
    for index in range(20):
        (root / "sub").mkdir(parents=True, exist_ok=True)
        (root / "sub" / f"{index:02d}.py").write_text("ab")
    (root / "test").mkdir()
    (root / "test" / "skipped.py").write_text("abcdefgh")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(root))
    assert [len(text) for text in stdlib_text()] == [2 * 19, 2]


def test_windows_are_of_the_text_and_targets_one_byte_later():
    text = torch.arange(50, dtype=torch.uint8)
    windows, targets = batch(text, 30, 8, rng())
    assert windows.shape == targets.shape == (30, 8)
    assert torch.equal(windows - windows[:, :1], torch.arange(8).expand(30, 8))
    assert torch.equal(targets, windows + 1)
    assert len(set(windows[:, 0].tolist())) > 10


def test_learning_rate_rises_then_falls_to_a_tenth():
    rates = [learning_rate(step, 100, 2.0, warm_up=10) for step in range(101)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9] == rates[10] == 2.0
    assert rates[100] == pytest.approx(0.2)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_strings_hide_letters_among_noise_at_random_places():
    source, target = strings(200, 12, rng())
    assert target.shape == (200, letters_in(12)) == (200, 9)
    places = source < LETTERS
    assert torch.equal(source[places].view(200, 9).flip(1), target)
    assert source.max() < START
    assert len({tuple(row.tolist()) for row in places}) > 100  # of 220 ways to place 9 in 12
    counts = target.flatten().bincount(minlength=LETTERS).double()
    assert (counts / counts.sum()).sub(1 / LETTERS).abs().max() < 0.03


# Models


@pytest.mark.parametrize(
    ("scale", "factor"),
    [("none", 1.0), ("sqrt_dk", 24**-0.5), ("dk", 1 / 24), ("power", 3 * 24**-0.25), ("learned", 24**-0.5)],
)
@pytest.mark.parametrize("rotary", [False, True])
def test_attention_is_the_formula_with_the_scale_asked_for(scale, factor, rotary):
    law = {"factor": 3.0, "exponent": 0.25}
    settings = TrainingSettings("decoder", head_dim=24, heads=2, rate=1e-3, seed=0, scale=scale, width=16, **law)
    attention = new_attention(settings, causal=True, rotary=rotary).double()
    x = torch.randn(3, 7, 16, dtype=torch.float64)
    inside = attention.norm(x)
    q, k, v = (
        part.unflatten(-1, (2, -1)).transpose(1, 2)
        for part in (inside @ attention.heads.in_proj_weight.mT).split([48, 48, 16], -1)
    )
    q, k = rope(q, k) if rotary else (q, k)
    hidden = torch.ones(7, 7, dtype=torch.bool).triu(1)
    weights = (factor * q @ k.mT).masked_fill(hidden, -math.inf).softmax(-1)
    expected = x + (weights @ v).transpose(1, 2).flatten(2) @ attention.heads.out_proj.weight.mT
    torch.testing.assert_close(attention(x), expected)


def test_additive_and_cosine_scores_are_their_formulas():
    base = TrainingSettings("decoder", head_dim=6, rate=1e-3, seed=0, scale="none", width=16)
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    for score in ("additive", "cosine"):
        attention = new_attention(replace(base, score=score)).double()
        inside = attention.norm(x)
        q, k, v = (inside @ attention.heads.in_proj_weight.mT).split([6, 6, 16], -1)
        if score == "additive":
            logits = (q.unsqueeze(-2) + k.unsqueeze(-3)).tanh() @ attention.heads.score.v[0]
        else:
            logits = 10 * F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT
        expected = x + logits.softmax(-1) @ v @ attention.heads.out_proj.weight.mT
        torch.testing.assert_close(attention(x), expected)


@pytest.mark.parametrize("model", [Decoder, EncoderDecoder])
def test_only_the_weights_of_q_and_k_grow_with_the_head_dimension(model):
    name = "decoder" if model is Decoder else "encoder_decoder"
    settings = TrainingSettings(name, head_dim=16, rate=1e-3, seed=0)
    small, large = (model(replace(settings, head_dim=d)) for d in (16, 512))
    shapes = [{n: p.shape for n, p in m.named_parameters()} for m in (small, large)]
    differ = {n for n in shapes[0] if shapes[0][n] != shapes[1][n]}
    assert {n.rpartition(".")[2] for n in differ} == {"in_proj_weight"}
    for n in differ:
        assert shapes[1][n][0] - shapes[0][n][0] == 2 * (512 - 16)


@pytest.mark.parametrize(("init", "variance"), [("unit", 256.0), ("folded", 1.0), ("0.02", 256.0 * (64 * 4e-4) ** 2)])
def test_start_gives_the_products_the_variance_it_names(init, variance):
    settings = TrainingSettings("decoder", head_dim=256, rate=1e-3, seed=0, init=init)
    products = []
    for seed in range(20):
        attention = Attention(settings)
        start(attention, settings, rng(seed))
        query, key = weights_of(attention.heads)
        products.append((normed(40, 64, 2 * seed) @ query.mT) @ (normed(40, 64, 2 * seed + 1) @ key.mT).mT)
    # the inputs span 64 dimensions only: the scatter over seeds is wider than that of independent entries
    assert torch.stack(products).var().item() == pytest.approx(variance, rel=0.1)


def test_start_depends_on_its_generator_alone():
    settings = TrainingSettings("decoder", head_dim=16, rate=1e-3, seed=0)
    weights = []
    for state in (0, 1):
        torch.manual_seed(state)
        model = Decoder(settings)
        start(model, settings, rng(5))
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_stored_products_are_rounded_before_the_scale_and_keep_a_gradient():
    query = torch.randn(1, 1, 5, 64, requires_grad=True)
    key = torch.randn(1, 1, 9, 64)
    score = StoredProducts()
    products = score.pairs(*score.prepare(query, key))
    assert torch.equal(products, (query @ key.mT).bfloat16().float())
    assert not torch.equal(products, query @ key.mT)
    out = sqrtdk.attention(query, key, torch.eye(9).view(1, 1, 9, 9), scale=0.125, score=score)
    torch.testing.assert_close(out, (0.125 * products).softmax(-1))
    out[..., 0].sum().backward()
    assert query.grad.abs().sum() > 0


def test_decoder_sees_no_later_byte_and_encoder_decoder_no_later_letter():
    settings = TrainingSettings("decoder", head_dim=16, rate=1e-3, seed=0, length=12)
    decoder, pair = Decoder(settings), EncoderDecoder(settings)
    text = torch.randint(256, (1, 12))
    changed = text.clone()
    changed[0, 7] += 1
    same = (decoder(text) == decoder(changed)).all(-1)[0]
    assert same.tolist() == [True] * 7 + [False] * 5
    source, target = strings(1, 12, rng())
    changed = target.clone()
    changed[0, 4] = (changed[0, 4] + 1) % LETTERS
    same = (pair(source, target) == pair(source, changed)).all(-1)[0]
    assert same.tolist() == [True] * 5 + [False] * 4


# The trainer


@pytest.mark.parametrize("settings", [TINY, TINY_TEXT])
def test_training_is_a_function_of_the_cell_alone(settings):
    torch.manual_seed(7)
    state = torch.get_rng_state()
    first = train(settings.cell())
    assert torch.equal(torch.get_rng_state(), state)
    torch.randn(3)
    second = train(json.loads(json.dumps(settings.cell())))
    assert without_time(first) == without_time(second)
    assert json.loads(json.dumps(first)) == first
    assert train(replace(settings, seed=4).cell())["held_out"] != first["held_out"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "settings",
    [
        TINY,
        TINY_TEXT,
        replace(TINY, score="additive", scale="none"),
        replace(TINY, precision="bfloat16", logits="stored"),
    ],
)
def test_watching_changes_no_bit_of_the_losses(settings):
    watched, unwatched = train(settings.cell()), train(replace(settings, points=0).cell())
    assert watched["held_out"] == unwatched["held_out"]
    every = train(replace(settings, points=settings.steps).cell())
    assert every["held_out"] == watched["held_out"]
    assert unwatched["curves"] == {"step": []}
    step, loss = (every["curves"][name] for name in ("step", "loss"))
    assert step == list(range(12))
    assert watched["curves"]["step"] == [0, 4, 7, 11]
    assert watched["curves"]["loss"] == pytest.approx(
        [loss[0], sum(loss[1:5]) / 4, sum(loss[5:8]) / 3, sum(loss[8:]) / 4]
    )


@pytest.mark.full
def test_a_scaled_model_learns_to_look_and_an_unscaled_wide_one_does_not():
    base = replace(TINY, head_dim=64, width=64, rows=32, steps=120, points=8)
    scaled, bare = (train(replace(base, scale=scale).cell()) for scale in ("sqrt_dk", "none"))
    guess = math.log(LETTERS)
    assert scaled["held_out"] < 0.6 * guess
    assert bare["held_out"] > 0.7 * guess
    assert scaled["curves"]["loss"][0] > guess > scaled["curves"]["loss"][-1]
    assert max(bare["curves"]["max_logit"]) > 4 * max(scaled["curves"]["max_logit"])
    assert bare["curves"]["entropy_share"][0] < 0.5 < scaled["curves"]["entropy_share"][0] < 1.0


@pytest.mark.full
def test_half_precision_and_stored_logits_are_other_runs_that_still_learn():
    base = replace(TINY, width=32, rows=16, steps=60, points=0)
    losses = [
        train(replace(base, precision=precision, logits=logits).cell())["held_out"]
        for precision, logits in (("float32", "kernel"), ("bfloat16", "kernel"), ("bfloat16", "stored"))
    ]
    assert len(set(losses)) == 3
    assert max(losses) - min(losses) < 0.2
    assert max(losses) < math.log(LETTERS)


def test_a_run_that_diverges_says_when():
    result = train(replace(TINY, rate=1e30, points=12).cell())
    assert result["held_out"] is None
    assert 0 < result["diverged_at"] < 12
    assert result["curves"]["step"] == list(range(result["diverged_at"]))
    assert train(TINY.cell())["diverged_at"] is None


def test_a_run_that_diverges_by_its_last_update_says_so():
    # the losses before the two updates are finite, that of the held-out data after them is not
    result = train(replace(TINY, rate=1e30, steps=2, points=2).cell())
    assert (result["held_out"], result["diverged_at"]) == (None, 2)
    assert result["curves"]["step"] == [0, 1]


@pytest.mark.parametrize("settings", [TINY, TINY_TEXT])
def test_noise_costs_are_those_of_the_noise(settings, monkeypatch):
    costs = train(settings.cell())["noise_costs"]
    assert set(costs) == {"inputs", "weights"}
    assert all(abs(cost) > 1e-4 for cost in costs.values())
    for name in ("NOISE_ON_INPUTS", "NOISE_ON_WEIGHTS"):
        monkeypatch.setattr(f"sqrtdk_lab.training.train.{name}", 0.0)
    assert set(train(settings.cell())["noise_costs"].values()) == {0.0}


def test_noise_leaves_the_weights_of_the_model_as_they_are():
    model = Decoder(TINY_TEXT)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    text = torch.randint(256, (2, 2, TINY_TEXT.length), generator=torch.Generator().manual_seed(0))
    noise_costs(model, TINY_TEXT, [(text[0], text[1])])
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_training_leaves_the_number_of_threads_as_it_was():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        train(replace(TINY, steps=2).cell())
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": "root"}, "scale is 'root'"),
        ({"model": "rnn"}, "model is 'rnn'"),
        ({"head_dim": 1}, "head_dim is at least 2; got 1"),
        ({"rate": math.nan}, "rate is a finite number above 0"),
        ({"heads": 3}, "heads divides width; got 3 heads and width 16"),
        ({"logits": "stored"}, "stored logits are those of a dot product in autocast"),
        ({"epochs": 3}, "a training run has no epochs"),
    ],
)
def test_bad_cells_are_refused(change, message):
    with pytest.raises(InvalidValueError, match=message):
        train({**TINY.cell(), **change})


# The observer


def test_logit_figures_are_those_of_the_logits():
    settings = replace(TINY_TEXT, scale="none", layers=2)
    model = Decoder(settings)
    start(model, settings, rng(2))
    text = torch.randint(256, (3, 16))
    seen = []
    for layer in model.layers:
        layer.attention.heads.register_forward_pre_hook(lambda module, args: seen.append((module, args[0])))
    found = logit_figures(lambda record: model(text, record=record))
    hidden = torch.ones(16, 16, dtype=torch.bool).triu(1)
    largest, smallest, shares, variances = [], [], [], []
    for heads, inside in seen:
        query, key = rope(*(inside @ weight.mT for weight in weights_of(heads)))
        logits = (query @ key.mT).masked_fill(hidden, -math.inf)
        weights = logits.softmax(-1)
        entropy = -torch.xlogy(weights, weights).sum(-1)[:, 1:]
        largest.append(logits.max().item())
        smallest.append(logits.masked_fill(hidden, math.inf).min().item())
        shares.append((entropy / torch.arange(2, 17).log()).mean().item())
        variances.append(torch.stack([logits[:, i, : i + 1].var(-1).mean() for i in range(1, 16)]).mean().item())
    assert len(seen) == 2
    size = max(map(abs, largest + smallest))
    room = allowed(torch.float32, length=max(query.shape[-2:]), logit=size, magnitude=1.0)
    assert found["max_logit"] == pytest.approx(max(largest), abs=room)
    assert found["min_logit"] == pytest.approx(min(smallest), abs=room)
    assert found["entropy_share"] == pytest.approx(sum(shares) / 2, abs=room)
    assert found["logit_std"] == pytest.approx(math.sqrt(sum(variances) / 2), abs=room)


def test_gradient_quantiles_are_those_of_the_query_weights():
    model = nn.ModuleList([Attention(replace(TINY, head_dim=d)) for d in (4, 8)])
    gradients = []
    for part in model:
        weight = part.heads.in_proj_weight
        weight.grad = torch.randn(weight.shape)
        gradients.append(weight.grad[: part.heads.head_dim].abs().flatten())
    expected = torch.cat(gradients).quantile(torch.tensor([0.1, 0.5, 0.9]), interpolation="nearest")
    assert list(query_gradients(model).values()) == expected.tolist()

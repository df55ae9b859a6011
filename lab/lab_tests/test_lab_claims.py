"""Every claim of the register: its verdict, its control, its texts. The controls turn each premise round."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from sqrtdk.messages import Text
from sqrtdk.messages._catalogue import catalogue_text
from sqrtdk_lab.cells import Cells
from sqrtdk_lab.claim import EXPLANATION_IDS, GROUPS, Claim
from sqrtdk_lab.record import Record
from sqrtdk_lab.register import CLAIMS
from sqrtdk_lab.runner import run_claim

# What the experiments answer, quick and full, for every seed that was tried.
VERDICTS = {
    "var-linear": "holds",
    "var-general": "holds",
    "var-sigma": "depends",
    "std-512": "holds",
    "range-512": "holds",
    "range-64": "holds",
    "normal": "depends",
    "init-scaling": "depends",
    "init-equivalent": "depends",
    "cosine-analogy": "partly",
    "mean-range": "fails",
    "dynamic": "fails",
    "seed-code-shapes": "partly",
    "onehot-64": "holds",
    "softmax-example": "fails",
    "exp-examples": "holds",
    "derivative-floor": "fails",
    "saturation-by-dim": "holds",
    "printed-maxima": "fails",
    "minmax-by-dim": "holds",
    "entropy-table": "fails",
    "few-positions": "depends",
    "seed-prints": "fails",
    "v-scaling": "holds",
    "temperature": "holds",
    "optimal-interval": "depends",
    "jacobian-vanishes": "holds",
    "grad-norm": "depends",
    "train-instability": "holds",
    "small-dk": "depends",
    "init-variance": "depends",
    "layernorm-role": "depends",
    "batchnorm-analogy": "depends",
    "deep-models": "fails",
    "any-dk": "partly",
    "robust": "partly",
    "dk-trained": "fails",
    "scale-dk": "depends",
    "scale-two-sqrt": "partly",
    "best-exponent": "depends",
    "additive-bounded": "depends",
    "cosine-unscaled": "depends",
    "bilinear-unscaled": "holds",
    "relative-scale": "depends",
    "per-head-dk": "holds",
    "cross-modal": "depends",
    "fp16-overflow": "depends",
    "softmax-overflow": "depends",
    "amp-scaling": "depends",
    "free": "depends",
    "dot-faster": "holds",
    "params-single": "fails",
    "params-multi": "holds",
    "params-table": "depends",
    "large-dk": "fails",
    "seed-module": "depends",
    "heads-differ": "holds",
    "heads-claims": "partly",
    "paper-footnote": "holds",
    "paper-table3": "fails",
}
# What their controls answer where it is not "fails".
CONTROLS = {
    "batchnorm-analogy": "holds",
    "cosine-analogy": "holds",
    "best-exponent": "partly",
    "cosine-unscaled": "holds",
    "cross-modal": "holds",
    "deep-models": "holds",
    "derivative-floor": "holds",
    "dk-trained": "partly",
    "dynamic": "holds",
    "entropy-table": "holds",
    "large-dk": "holds",
    "mean-range": "holds",
    "paper-table3": "holds",
    "params-single": "holds",
    "printed-maxima": "holds",
    "seed-code-shapes": "holds",
    "seed-module": "partly",
    "seed-prints": "holds",
    "softmax-example": "holds",
    "var-linear": "partly",
}
SEEDS = range(5)
ONE_SENTENCE = re.compile(r"[A-Z](?:[^.]|\.(?! ))+\.")
CJK = re.compile(r"[\u3000-\u9fff\uff00-\uffef]")
NARROW = re.compile("(?<=[\u4e00-\u9fff])[,:;]|[,:;](?=[\u4e00-\u9fff])")  # ASCII punctuation in Chinese


# Trainings of a minute and more, five where a CPU has no products of bfloat16; heads-differ trains in every run.
LONG = {
    "amp-scaling",
    "any-dk",
    "best-exponent",
    "deep-models",
    "dk-trained",
    "heads-claims",
    "init-equivalent",
    "optimal-interval",
    "robust",
    "small-dk",
    "train-instability",
}
TINY = {"steps": 2, "rows": 2, "length": 8, "points": 2}
TRAINED = {"seeds": 2, "rates": (1e-3,), "text": TINY, "strings": TINY}
# Claims whose quick run takes half a second of CPU or more, and sizes at which all of their code runs in a moment.
SMALLER: dict[str, dict[str, Any]] = {
    "amp-scaling": {**TRAINED, "mixed_rates": (1e-3,), "draws": 20, "keys": 8},
    "any-dk": {**TRAINED, "dims": (4, 8)},
    "batchnorm-analogy": {"pairs": 1000},
    "best-exponent": {"seeds": 2, "text": TINY, "dims": (4, 8), "start_dims": (4, 8), "draws": 2},
    "bilinear-unscaled": {"dims_and_steps": ((8, 4), (16, 4)), "learners": 2},
    "cosine-analogy": {"pairs": 500},
    "deep-models": {**TRAINED, "models": ((1, 4), (2, 4))},
    "dk-trained": {**TRAINED, "d_k": 4},
    "entropy-table": {"numbers": 100_000, "longest": 64, "least_rows": 20},
    "few-positions": {"rows": 300, "windows": 2},
    "grad-norm": {"keys_and_rows": ((32, 60), (64, 20))},
    "heads-claims": {"seeds": 2, "text": {**TINY, "points": 0}, "short": {"steps": 2, "rows": 2}, "windows": 4},
    "heads-differ": {"seeds": 2, "text": {**TINY, "points": 0}},
    "init-equivalent": {**TRAINED, "drawn_rates": (1e-3,), "trained_dim": 8, "pairs": 1000, "layers": 2},
    "init-variance": {"layers": 3, "tokens": 16},
    "mean-range": {"pairs": 1000},
    "minmax-by-dim": {"rows": 600},
    "normal": {"pairs": 5000, "queries": 2000},
    "optimal-interval": {"seeds": 2, "text": TINY, "dims": (4, 8), "keys": (8, 32), "blocks": 2, "lengths": (8,)},
    "paper-footnote": {"pairs": 6000},
    "printed-maxima": {"runs": 600},
    "range-512": {"draws": 2},
    "robust": {**TRAINED, "rates": (1e-3, 3e-3), "d_k": 4},  # compares two rates
    "saturation-by-dim": {"rows": 300},
    "scale-two-sqrt": {"rows": 50, "learners": 2, "rates": (0.02,), "steps": 4},
    "seed-code-shapes": {"runs": 20},
    "seed-module": {"modules": 20, "dims": (16,)},
    "small-dk": {**TRAINED, "additive_rates": (4e-3,), "dims": (4, 16, 64)},
    "softmax-overflow": {"rows": 100},
    "std-512": {"pairs": 4000},
    "train-instability": {**TRAINED, "dims": (4, 8)},
    "var-general": {"pairs": 20_000},
    "var-linear": {"pairs": 4000},
    "var-sigma": {"pairs": 3000},
}


def _marked(ids: list[str]) -> list[object]:
    """Times are not measured beside other tests."""

    def mark(name: str) -> Any:
        if CLAIMS[name].timed or name in LONG:
            return pytest.mark.slow
        return pytest.mark.full if name in SMALLER else ()

    return [pytest.param(name, marks=mark(name)) for name in ids]


@pytest.fixture(scope="session")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Cells:
    """Trainings that several claims share run once, also where several processes run the tests."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if base.name.startswith("popen-") else base) / "cells"
    folder.mkdir(exist_ok=True)
    return Cells(folder=folder)


def _judged(record: Record) -> str:
    parts = [
        (part.text.en, part.met, [str(check) for check in part.checks]) for part in record.outcome.verdict.findings
    ]
    control = [(part.text.en, part.met) for part in record.control.verdict.findings]
    return f"{parts}\ncontrol: {control}"


def _check(record: Record) -> None:
    """The verdict and that of the control; no part of either is undecided."""
    assert record.outcome.verdict.answer == VERDICTS[record.id], _judged(record)
    assert record.control.verdict.answer == CONTROLS.get(record.id, "fails"), _judged(record)
    assert record.decided, _judged(record)
    assert record.sound


def _check_languages(text: Text) -> None:
    assert not CJK.search(text.en)
    assert CJK.search(text.zh)
    assert not NARROW.search(text.zh), text.zh


def test_the_register_is_whole() -> None:
    assert len(CLAIMS) == 60
    assert set(CLAIMS) == set(VERDICTS)
    assert {claim.group for claim in CLAIMS.values()} == set(GROUPS)


def test_each_explanation_has_a_name_and_says_something() -> None:
    for source in EXPLANATION_IDS:
        _check_languages(catalogue_text(f"lab.explanation.{source}.name"))
        _check_languages(catalogue_text(f"lab.explanation.{source}.says"))
    assert set(EXPLANATION_IDS) <= {source for claim in CLAIMS.values() for source in claim.sources}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", _marked(list(CLAIMS)))
def test_verdict_of_the_quick_run_and_of_its_control(name: str, cells: Cells) -> None:
    record = run_claim(CLAIMS[name], quick=True, compute=cells)
    _check(record)
    assert record.condition == (CLAIMS[name].condition if VERDICTS[name] == "depends" else None)
    _check_words(record)


@pytest.mark.full
@pytest.mark.parametrize("name", SMALLER)
def test_a_costly_claim_has_its_figures_and_words_at_smaller_sizes(name: str) -> None:
    """So few samples may leave it open, and say nothing else; learners that have not learned are not judged."""
    claim = CLAIMS[name]
    record = run_claim(replace(claim, quick={**claim.quick, **SMALLER[name]}), quick=True)
    for outcome in (record.outcome, record.control):
        assert all((part.reason is None) == (len(part.checks) > 0) for part in outcome.verdict.findings)
    if not {"seeds", "learners"} & set(claim.parameters):
        assert record.outcome.verdict.answer in (VERDICTS[name], "undecided"), _judged(record)
        assert record.control.verdict.answer in (CONTROLS.get(name, "fails"), "undecided"), _judged(record)
    _check_words(record)


def _check_words(record: Record) -> None:
    for text in (record.why, *(plot.caption for plot in record.plots)):
        _check_languages(text)
    for plot in record.plots:
        drawn = [
            plot.x_label,
            plot.y_label,
            *(series.label for series in plot.series),
            *(line[0] for line in plot.lines),
        ]
        assert not any(CJK.search(label) for label in drawn)
        assert all(len(series.x) == len(series.y) for series in plot.series)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", list(CLAIMS))
def test_verdicts_are_stable_over_seeds(name: str, seed: int, cells: Cells) -> None:
    _check(run_claim(CLAIMS[name], quick=True, seed=seed, compute=cells))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(CLAIMS))
def test_verdict_of_the_full_run_is_that_of_the_quick_one(name: str, cells: Cells) -> None:
    _check(run_claim(CLAIMS[name], compute=cells))


@pytest.mark.parametrize("claim", list(CLAIMS.values()), ids=list(CLAIMS))
def test_texts_and_parameters(claim: Claim) -> None:
    from latex2mathml.converter import convert

    assert claim.measure.__module__.rpartition(".")[2] == claim.id.replace("-", "_")
    said = (claim.statement, claim.method, claim.control, claim.condition, *(part.text for part in claim.parts))
    for text in said:
        if text is not None:
            _check_languages(text)
    if claim.condition is not None:
        assert ONE_SENTENCE.fullmatch(claim.condition.en)
        assert re.fullmatch("[^。]+。", claim.condition.zh)
    assert claim.sources
    assert all(source in EXPLANATION_IDS or re.fullmatch(r"arXiv:\d{4}\.\d{5}", source) for source in claim.sources)
    assert claim.flipped
    assert claim.settings(flipped=True) != claim.settings()
    assert "<math" in convert(claim.formula)
    assert "merror" not in convert(claim.formula)

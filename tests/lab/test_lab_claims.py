"""Every claim of the register: its verdict, its control, its texts. The controls turn each premise round."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from sqrtdk.lab.cells import Cells
from sqrtdk.lab.claim import EXPLANATION_IDS, GROUPS, Claim
from sqrtdk.lab.record import Record
from sqrtdk.lab.register import CLAIMS
from sqrtdk.lab.runner import run_claim
from sqrtdk.messages import Text
from sqrtdk.messages._catalogue import catalogue_text

# What the experiments answer, quick and full, for every seed that was tried.
VERDICTS = {
    "var-linear": "holds",
    "var-general": "holds",
    "std-512": "holds",
    "range-512": "depends",
    "range-64": "holds",
    "normal": "depends",
    "init-scaling": "depends",
    "seed-code-shapes": "partly",
    "onehot-64": "holds",
    "softmax-example": "fails",
    "derivative-floor": "fails",
    "saturation-by-dim": "holds",
    "printed-maxima": "depends",
    "minmax-by-dim": "holds",
    "entropy-table": "fails",
    "few-positions": "depends",
    "v-scaling": "holds",
    "temperature": "holds",
    "optimal-interval": "depends",
    "jacobian-vanishes": "holds",
    "grad-norm": "partly",
    "train-instability": "holds",
    "small-dk": "depends",
    "init-variance": "depends",
    "layernorm-role": "depends",
    "batchnorm-analogy": "depends",
    "scale-dk": "depends",
    "scale-two-sqrt": "partly",
    "best-exponent": "depends",
    "additive-bounded": "depends",
    "cosine-unscaled": "partly",
    "bilinear-unscaled": "depends",
    "relative-scale": "depends",
    "per-head-dk": "holds",
    "cross-modal": "depends",
    "fp16-overflow": "depends",
    "softmax-overflow": "depends",
    "amp-scaling": "depends",
    "free": "depends",
    "dot-faster": "holds",
    "params-single": "holds",
    "params-multi": "holds",
    "heads-differ": "holds",
    "paper-footnote": "holds",
    "paper-table3": "fails",
}
# What their controls answer where it is not "fails".
CONTROLS = {
    "batchnorm-analogy": "holds",
    "best-exponent": "partly",
    "bilinear-unscaled": "holds",
    "cosine-unscaled": "holds",
    "cross-modal": "holds",
    "derivative-floor": "holds",
    "entropy-table": "holds",
    "paper-table3": "holds",
    "seed-code-shapes": "holds",
    "softmax-example": "holds",
    "var-linear": "partly",
}
SEEDS = range(5)
ONE_SENTENCE = re.compile(r"[A-Z](?:[^.]|\.(?! ))+\.")
CJK = re.compile(r"[\u3000-\u9fff\uff00-\uffef]")
NARROW = re.compile("(?<=[\u4e00-\u9fff])[,:;]|[,:;](?=[\u4e00-\u9fff])")  # ASCII punctuation in Chinese


# Trainings of a minute and more, five where a CPU has no products of bfloat16; heads-differ trains in every run.
LONG = {"small-dk", "train-instability", "amp-scaling", "best-exponent", "optimal-interval"}
TINY = {"steps": 2, "rows": 2, "length": 8, "points": 2}
TRAINED = {"seeds": 2, "rates": (1e-3,), "text": TINY, "strings": TINY}
# Claims whose quick run takes half a second of CPU or more, and sizes at which all of their code runs in a moment.
SMALLER: dict[str, dict[str, Any]] = {
    "amp-scaling": {**TRAINED, "mixed_rates": (1e-3,), "draws": 20, "keys": 8},
    "batchnorm-analogy": {"pairs": 1000},
    "best-exponent": {"seeds": 2, "text": TINY, "dims": (4, 8), "start_dims": (4, 8), "draws": 2},
    "bilinear-unscaled": {"dims_and_steps": ((8, 4), (16, 4)), "learners": 2},
    "entropy-table": {"numbers": 100_000, "longest": 64, "least_rows": 20},
    "few-positions": {"rows": 300, "windows": 2},
    "grad-norm": {"blocks": 4, "rows": 16},
    "heads-differ": {"seeds": 2, "text": {**TINY, "points": 0}},
    "init-variance": {"layers": 3, "tokens": 16},
    "minmax-by-dim": {"rows": 600},
    "normal": {"pairs": 5000},
    "optimal-interval": {"seeds": 2, "text": TINY, "dims": (4, 8), "keys": (8, 32), "blocks": 2, "lengths": (8,)},
    "paper-footnote": {"pairs": 6000},
    "printed-maxima": {"numbers": 200_000, "matrices": 50},
    "range-512": {"draws": 2},
    "saturation-by-dim": {"rows": 300},
    "scale-two-sqrt": {"rows": 50, "learners": 2, "rates": (0.02,), "steps": 4},
    "seed-code-shapes": {"runs": 20},
    "small-dk": {**TRAINED, "additive_rates": (4e-3,), "dims": (4, 16, 64)},
    "softmax-overflow": {"rows": 100},
    "std-512": {"pairs": 4000},
    "train-instability": {**TRAINED, "dims": (4, 8)},
    "var-general": {"pairs": 20_000},
    "var-linear": {"pairs": 4000},
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
    assert len(CLAIMS) == 45
    assert set(CLAIMS) == set(VERDICTS)
    assert {claim.group for claim in CLAIMS.values()} == set(GROUPS)


def test_each_explanation_has_a_name_and_says_something() -> None:
    for source in EXPLANATION_IDS:
        _check_languages(catalogue_text(f"lab.explanation.{source}.name"))
        _check_languages(catalogue_text(f"lab.explanation.{source}.says"))
    assert set(EXPLANATION_IDS) <= {source for claim in CLAIMS.values() for source in claim.sources}


@pytest.mark.parametrize("name", _marked(list(CLAIMS)))
def test_verdict_of_the_quick_run_and_of_its_control(name: str, cells: Cells) -> None:
    record = run_claim(CLAIMS[name], quick=True, compute=cells)
    _check(record)
    assert record.condition == (CLAIMS[name].condition if VERDICTS[name] == "depends" else None)
    _check_words(record)


@pytest.mark.parametrize("name", SMALLER)
def test_a_costly_claim_has_its_figures_and_words_at_smaller_sizes(name: str) -> None:
    """So few samples may leave it open, and say nothing else; learners that have not learned are not judged."""
    claim = CLAIMS[name]
    record = run_claim(replace(claim, quick={**claim.quick, **SMALLER[name]}), quick=True)
    for outcome in (record.outcome, record.control):
        assert [len(part.checks) > 0 for part in outcome.verdict.findings] == [True] * len(claim.parts)
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

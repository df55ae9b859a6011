"""A wrapped model is answered for as the plain one is: the same sites, verdicts, laws, causes and statistics."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import distributed, nn

import sqrtdk
from sqrtdk import laws
from sqrtdk._wrappers import named_parameters, unwrapped
from sqrtdk.errors import InvalidTypeError
from tests.models.wrapped_models import IDS, WRAPPED, Logits, decoder, never

INPUTS = {"input_ids": IDS}
CHEAP = ("compiled", "layers compiled", "checkpointed", "DDP of compiled")
NAMES = [name if name in CHEAP else pytest.param(name, marks=pytest.mark.full) for name in WRAPPED]
KEPT = {"finite", "samples", "causal", "left_padding", "cache", "shift", "place", "heads", "configured", "modes"}


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def wrapped(name: str, model: nn.Module | None = None) -> nn.Module:
    with warnings.catch_warnings():  # torch's own, of old and of experimental parts
        warnings.simplefilter("ignore")
        return WRAPPED[name].wrap(decoder() if model is None else model)


def unscaled() -> Any:
    model = decoder()
    for layer in model.model.layers:
        layer.self_attn.scaling = 1.0
    return model


def calls(report: Any, inside: str = "") -> list[tuple[Any, ...]]:
    told = [(each.call.site, each.call.index, each.call.formula, each.verdict, each.mistake) for each in report.calls]
    return [(site.removeprefix(inside), *rest) for site, *rest in told]


def states(report: Any) -> dict[str, str]:
    return {answer.law: answer.state for answer in getattr(report, "laws", ()) or report.answers}


@cache
def plain_report(planted: bool) -> Any:
    return sqrtdk.check(unscaled() if planted else decoder(), INPUTS, laws="none")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("planted", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_check(name: str, planted: bool) -> None:
    report = sqrtdk.check(wrapped(name, unscaled() if planted else None), INPUTS, laws="none")
    inside = WRAPPED[name].inside
    assert calls(report, inside) == calls(plain_report(planted))
    sites = {one.site for one in plain_report(planted).findings}  # a program has no config: its findings name no field
    assert {one.site.removeprefix(inside) for one in report.findings} == sites
    assert {each.mistake for each in report.calls} == ({"missing"} if planted else {None})


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_laws(name: str) -> None:
    answers = states(laws.ask(wrapped(name), INPUTS))
    unasked = WRAPPED[name].unasked
    kept = {law for law, state in answers.items() if state == "kept"}
    assert kept - {"gradient"} == KEPT - unasked
    assert answers["gradient"] in ("kept", "not asked")  # not asked of what does not train
    assert all(answers[law] == "not asked" for law in unasked)


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_diff(name: str) -> None:
    same = sqrtdk.diff(decoder(), wrapped(name), INPUTS)
    inside = WRAPPED[name].inside
    assert same.same
    assert [pair.site_b.removeprefix(inside) for pair in same.pairs] == [pair.site_a for pair in same.pairs]
    other = sqrtdk.diff(decoder(), wrapped(name, unscaled()), INPUTS)
    assert [cause.name for cause in other.pairs[0].causes] == ["scale"]
    assert [cause.name for cause in other.pairs[1].causes] == ["scale"]


def watched(model: nn.Module) -> tuple[dict[tuple[str, int], dict[str, Any]], list[str]]:
    with sqrtdk.watch(model, every=1, on_alarm=lambda alarm: None) as watch:
        output = model(**INPUTS)
        (output if isinstance(output, torch.Tensor) else output.logits).square().mean().backward()
        watch.step()
    found = {(call.site, call.index): dict(call.columns) for call in watch.samples[-1].calls}
    return found, [alarm.text for alarm in watch.alarms]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_watch(name: str) -> None:
    row = WRAPPED[name]
    if not row.trains:
        pytest.skip("it can't be trained")
    plain, _ = watched(decoder())
    found, alarms = watched(wrapped(name))
    assert [(site.removeprefix(row.inside), index) for site, index in found] == list(plain)
    for own, other in zip(found.values(), plain.values(), strict=True):
        for column in ("max_logit", "entropy_nats", "rows"):
            assert own[column] == pytest.approx(other[column], rel=1e-5)
        for column in () if row.without_gradients else ("query_grad_p50", "key_grad_p50"):
            assert own[column] == pytest.approx(other[column], rel=1e-4)
    assert any("no gradients" in text for text in alarms) == row.without_gradients


def test_a_wrapper_that_does_more_runs_itself() -> None:
    model = nn.DataParallel(decoder())
    assert unwrapped(model) is model.module
    model.register_forward_hook(lambda *_: None)
    assert unwrapped(model) is model

    class Shifted(nn.DataParallel):
        def forward(self, input_ids: torch.Tensor) -> Any:
            return self.module(input_ids.roll(1, 1))

    assert type(unwrapped(Shifted(decoder()))) is Shifted
    assert not sqrtdk.diff(decoder(), Shifted(decoder()), INPUTS).same


def test_parameters_have_the_names_of_the_plain_model() -> None:
    plain = dict(decoder().named_parameters())
    for name in ("compiled", "layers compiled", "checkpointed", "DDP of compiled"):
        assert [path for path, _ in named_parameters(wrapped(name))] == list(plain)


def test_a_trace_names_the_sites_of_the_plain_model() -> None:
    model = wrapped("layers compiled")
    with sqrtdk.trace(model) as run, torch.no_grad():
        model(**INPUTS)
    assert [call.site for call in run.calls] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]


def function() -> Any:
    model = decoder()
    return torch.compile(lambda ids: model(ids), backend=never)


class Pipeline:
    """As transformers' pipelines and trainers hold theirs."""

    def __init__(self) -> None:
        self.model = decoder()

    def __call__(self, text: str) -> str:
        return text


REFUSED = {
    "compiled function": (function, "pass the module that it calls, model."),
    "pipeline": (Pipeline, "This Pipeline holds the module: pass its attribute `model`."),
    "exported program": (
        lambda: torch.export.export(Logits(decoder()), (), INPUTS, strict=False), "pass program.module().",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_module_is_refused_with_what_to_pass(name: str) -> None:
    made, hint = REFUSED[name]
    given = made()
    for ask in (
        lambda: sqrtdk.check(given, INPUTS),
        lambda: sqrtdk.diff(decoder(), given, INPUTS),
        lambda: laws.ask(given, INPUTS),
        lambda: sqrtdk.watch(given),
        lambda: sqrtdk.trace(given),
    ):
        with pytest.raises(InvalidTypeError) as error:
            ask()
        assert hint in str(error.value.hint)

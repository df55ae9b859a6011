"""The list of odd models: each is judged right, or refused with one clear error. `pytest -v` prints it by name.

A right answer is the verdict and the scale, once for the textbook's scale and once for a missing one.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sqrtdk import check
from sqrtdk.errors import InvalidValueError, ModelError, SqrtdkError
from sqrtdk.models.load import resolve_model
from tests.attentions.each import each
from tests.audit import odd_models as odd
from tests.tolerances import allowed

pytestmark = pytest.mark.filterwarnings("ignore")  # strangers' models warn as they like

Make = Callable[[float], Any]
STATIC = {"static": True}


def simple(kind: Callable[[float], nn.Module]) -> Make:
    return lambda scale: (kind(scale), odd.inputs())


# name -> what makes the model and its inputs from a scale; all are judged
JUDGED: dict[str, Make] = {
    **{f"getattr gives {name}": simple(kind) for name, kind in odd.GETATTR.items()},
    **{f"a property: {name}": simple(kind) for name, kind in odd.PROPERTIES.items()},
    **{f"an override: {name}": simple(odd.overriding(name)) for name in odd.OVERRIDES},
    **{f"forward returns {name}": simple(kind) for name, kind in odd.RESULTS.items()},
    **{
        f"TorchScript, {kind}, {'inside' if inside else 'alone'}": lambda s, k=kind, i=inside: odd.script(s, k, i)
        for kind in ("script", "trace")
        for inside in (True, False)
    },
    **{f"sparse weights, {layout}": lambda s, la=layout: odd.sparse(s, la) for layout in ("coo", "csr", "csc", "bsr")},
    **{
        f"dynamic quantisation, {name}": lambda s, d=dtype: odd.dynamically_quantised(s, d)
        for name, dtype in (("int8", torch.qint8), ("float16", torch.float16))
    },
    "inference mode: inputs": lambda s: odd.made_in_inference_mode(s, weights=False, rows=True, runs=False),
    "inference mode: weights": lambda s: odd.made_in_inference_mode(s, weights=True, rows=False, runs=False),
    "inference mode: forward": lambda s: odd.made_in_inference_mode(s, weights=False, rows=False, runs=True),
    "inference mode: all": lambda s: odd.made_in_inference_mode(s, weights=True, rows=True, runs=True),
    "meta inputs, real model": lambda s: (odd.Attention(s), odd.inputs().to("meta")),
    "meta inputs, no weights": lambda s: (odd.Bare(s), tuple(torch.randn(3, 1, 4, 6, 8, device="meta"))),
    "real inputs, meta model": lambda s: (odd.Attention(s).to("meta"), odd.inputs()),
    "half of it on meta": odd.half_on_meta,
    "no weights": odd.bare,
    "NaN weights": odd.nan_weights,
    "float16 on a CPU": lambda s: (odd.Attention(s).half(), odd.inputs().half()),
    "inputs that want a gradient": lambda s: (odd.Attention(s), odd.inputs().requires_grad_()),
    "DataParallel": simple(lambda scale: nn.DataParallel(odd.Attention(scale))),
    "torch.compile": simple(lambda scale: torch.compile(odd.Attention(scale))),
    "parametrised, weight norm, pruned": odd.parametrised,
    "tied weights": odd.tied,
    "one module twice": odd.shared,
}
JUDGED_STATIC: dict[str, Make] = {
    "inference mode": JUDGED["inference mode: all"],
    "meta inputs": JUDGED["meta inputs, real model"],
    "half of it on meta": odd.half_on_meta,
    "no weights": odd.bare,
    "parametrised, weight norm, pruned": odd.parametrised,
    "tied weights": odd.tied,
    "getattr gives a RuntimeError that copy expects": simple(odd.raising(AttributeError)),
}
COPY = "can't be copied to the meta device"
READ = "no attention could be read"

# name -> what makes it, the options of check, and the error
REFUSED: dict[str, tuple[Make, dict[str, Any], type[SqrtdkError], str]] = {
    "getattr exits": (simple(odd.raising(SystemExit)), {}, ModelError, "raised SystemExit"),
    "getattr raises GeneratorExit": (simple(odd.raising(GeneratorExit)), {}, ModelError, "raised GeneratorExit"),
    **{
        f"no inputs, getattr gives {name}": (
            lambda s, kind=kind: (kind(s), None), {}, InvalidValueError, "no inputs were given"
        )
        for name, kind in odd.GETATTR.items()
    },
    **{
        f"static, getattr gives {name}": (simple(odd.GETATTR[name]), STATIC, ModelError, COPY)
        for name in ("an object that answers anything", "a mock", "a RuntimeError", "recursion without end")
    },
    "named_modules that raises": (
        simple(type("Odd", (odd.Attention,), {"named_modules": odd._no})), {}, ModelError, "can't list its parts"
    ),
    "parameters that gives nothing": (
        simple(type("Odd", (odd.Attention,), {"parameters": lambda *_: None})), {}, ModelError, "can't list its parts"
    ),
    "modules that gives numbers": (
        simple(type("Odd", (odd.Attention,), {"modules": lambda *_: [1]})), {}, ModelError, "parts that are no modules"
    ),
    "it can't be hashed": (
        simple(type("Odd", (odd.Attention,), {"__hash__": None})), {}, ModelError, "can't list its parts"
    ),
    "no call of super().__init__": (simple(lambda _: odd.Uninitialised()), {}, ModelError, "can't list its parts"),
    "it holds itself": (odd.cyclic, {}, ModelError, "can't list its parts: RecursionError"),
    "it holds itself, static": (odd.cyclic, STATIC, ModelError, "can't list its parts: RecursionError"),
    "training can't be set": (simple(odd.Frozen), {}, ModelError, "can't be put in evaluation mode"),
    "a part was deleted": (lambda s: odd.without(s, "v"), {}, ModelError, "has no attribute 'v'"),
    "lazy": (odd.lazy, {}, ModelError, r"weights without a shape yet, first q\.weight"),
    "lazy, static": (odd.lazy, STATIC, ModelError, r"weights without a shape yet, first q\.weight"),
    **{
        f"TorchScript, {kind}, {'inside' if inside else 'alone'}": (
            lambda s, k=kind, i=inside: odd.script(s, k, i), {}, ModelError, text
        )
        for kind, text in (("frozen", READ), ("frozen, optimized", READ), ("frozen trace", "raised RuntimeError"))
        for inside in (True, False)
    },
    **{
        f"TorchScript, {kind}, static": (
            lambda s, k=kind: odd.script(s, k, inside=False), STATIC, ModelError, f"{COPY}: the model is TorchScript"
        )
        for kind in ("script", "trace", "frozen", "frozen trace", "frozen, optimized")
    },
    **{
        f"sparse weights, {layout}, static": (lambda s, la=layout: odd.sparse(s, la), STATIC, ModelError, "Meta")
        for layout in ("coo", "csr", "csc", "bsr")
    },
    "dynamic quantisation, static": (
        lambda s: odd.dynamically_quantised(s, torch.qint8), STATIC, ModelError, "linear_dynamic"
    ),
    "meta inputs, TorchScript": (
        lambda s: (odd.script(s, "script", inside=False)[0], odd.inputs().to("meta")), {}, ModelError, COPY
    ),
    "nested inputs, strided": (
        lambda s: (odd.Attention(s), odd.nested(torch.strided)), {}, ModelError, "doesn't support sizes"
    ),
    "nested inputs, jagged, eager": (
        lambda s: (odd.Attention(s), odd.nested(torch.jagged)), {}, ModelError, r"raised RuntimeError: matmul\(\)"
    ),
    "nested inputs, static": (
        lambda s: (odd.Attention(s), odd.nested(torch.strided)), STATIC, ModelError, "tensor of the strided layout"
    ),
    "fake weights and inputs": (lambda s: odd.fake(s, rows=True), {}, ModelError, READ),
    "fake weights": (lambda s: odd.fake(s, rows=False), {}, ModelError, "raised AssertionError"),
    "complex weights": (
        lambda s: (odd.Attention(s).to(torch.complex64), odd.inputs().to(torch.complex64)), {}, ModelError,
        "raised NotImplementedError",
    ),
    "float8 weights": (simple(lambda s: odd.Attention(s).to(torch.float8_e4m3fn)), {}, ModelError, "same dtype"),
    "integer inputs": (lambda s: (odd.Attention(s), odd.inputs().long()), {}, ModelError, "same dtype"),
    "inputs that are text": (lambda s: (odd.Attention(s), ("text",)), {}, ModelError, "must be Tensor, not str"),
    "sparse inputs": (lambda s: (odd.Attention(s), odd.inputs().to_sparse()), {}, ModelError, "sparse tensors"),
    "a list of modules": (simple(lambda s: nn.ModuleList([odd.Attention(s)])), {}, ModelError, "NotImplementedError"),
    "forward is a generator": (simple(odd.Generating), {}, ModelError, "no attention ran"),
    "forward runs in another thread": (simple(odd.Threaded), {}, ModelError, "no attention ran"),
    **{
        f"forward raises {type(error).__name__}": (
            simple(lambda _, error=error: odd.Failing(error)), {}, ModelError, f"raised {type(error).__name__}"
        )
        for error in (GeneratorExit(), SystemExit(0), StopIteration(), MemoryError(), RecursionError(), BaseException())
    },
}  # fmt: skip

FACTORIES_REFUSED = {
    "raises_generator_exit": "calling .* raised GeneratorExit: stop",
    "raises_system_exit": "calling .* raised SystemExit: 0",
    "raises_base": "calling .* raised BaseException: stop",
    "raises_stop_iteration": "calling .* raised StopIteration",
    "gives_nothing": "gave an object of type NoneType",
    "gives_nothing_with_inputs": "gave an object of type tuple",
    "gives_a_generator": "gave an object of type generator",
    "gives_a_class": "gave an object of type type",
    "is_awaited": "gave an object of type coroutine",
    "moves_to_nothing": "can't be prepared",
}


@each("scale", [odd.ROOT, 1.0])
@pytest.mark.parametrize(
    ("make", "options"),
    [pytest.param(make, {}, id=name) for name, make in JUDGED.items()]
    + [pytest.param(make, STATIC, id=f"{name}, static") for name, make in JUDGED_STATIC.items()],
)
def test_an_odd_model_is_judged_right(make: Make, options: dict[str, Any], scale: float) -> None:
    model, inputs = odd.quiet(make, scale)
    report = check(model, inputs, **options)
    told = ("exact", None) if scale == odd.ROOT else ("unexplained", "missing")
    assert {(judged.verdict, judged.mistake) for judged in report.calls} == {told}
    for judged in report.calls:
        assert judged.call.scale.effective is not None
        off = abs(judged.call.scale.effective - scale)
        assert off <= allowed(torch.float32, length=1, logit=0.0, magnitude=scale)
    assert len(report.calls) == (2 if isinstance(model, odd.Net) and len(model.parts) == 2 else 1)
    assert not report.not_measured


@pytest.mark.parametrize(("make", "options", "error", "text"), REFUSED.values(), ids=list(REFUSED))
def test_an_odd_model_is_refused_clearly(
    make: Make, options: dict[str, Any], error: type[SqrtdkError], text: str
) -> None:
    model, inputs = odd.quiet(make, odd.ROOT)
    with pytest.raises(error, match=text) as caught:
        check(model, inputs, **options)
    assert caught.value.hint


@pytest.mark.parametrize(("name", "text"), FACTORIES_REFUSED.items(), ids=list(FACTORIES_REFUSED))
def test_an_odd_factory_is_refused_clearly(name: str, text: str) -> None:
    with pytest.raises(ModelError, match=text) as caught:
        check(f"tests.audit.odd_models:{name}")
    assert ("eval() of your class may return None" in caught.value.hint) == ("nothing" in name and "moves" not in name)
    assert caught.value.hint
    del caught
    gc.collect()  # a coroutine that nobody awaits warns where it is collected: here, not in another test


@each("name, verdict", [("right", "exact"), ("missing", "unexplained")])
def test_a_model_whose_eval_returns_nothing_is_judged_when_the_factory_returns_it(name: str, verdict: str) -> None:
    assert [judged.verdict for judged in check(f"tests.audit.odd_models:{name}").calls] == [verdict]
    assert not resolve_model(f"tests.audit.odd_models:{name}").module.training


@each("kind", ["frozen", "frozen trace"])
def test_frozen_torchscript_is_named_with_what_to_do(kind: str) -> None:
    model, inputs = odd.quiet(odd.script, 1.0, kind, True)
    with pytest.raises(ModelError) as caught:
        check(model, inputs)
    assert "parts.0 is frozen TorchScript" in caught.value.hint
    assert "before torch.jit.freeze" in caught.value.hint


@each("where", ["forward", "getattr"])
def test_an_interrupt_of_the_users_passes(where: str) -> None:
    model = odd.Failing(KeyboardInterrupt()) if where == "forward" else odd.raising(KeyboardInterrupt)(1.0)
    with pytest.raises(KeyboardInterrupt):
        check(model, odd.inputs())


@each("layout", ["coo", "csr", "csc", "bsr"])
def test_nan_in_a_sparse_weight_is_found(layout: str) -> None:
    model, inputs = odd.quiet(odd.sparse, odd.ROOT, layout)
    with torch.no_grad():
        weight = model.v.weight.detach()
        (weight._values() if layout == "coo" else weight.values()).fill_(float("nan"))
    assert "nonfinite" in {finding.rule for finding in check(model, inputs).findings}

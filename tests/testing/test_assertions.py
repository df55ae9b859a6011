"""`assert_attention` and `assert_same_attention`: what fails, what may stand, and how a failure reads."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as torch_module

from sqrtdk.errors import InvalidTypeError, InvalidValueError, ModelError
from sqrtdk.testing import assert_attention, assert_same_attention
from sqrtdk.testing.laws import CalledModels
from tests.attentions.planted import PLANTED, WIDTH, planted

SITES = "layers.0-2 (3 sites)"


class Odd(nn.Module):
    """An attention whose q went through an operation that no reading follows."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(torch.sort(self.q(x))[0], self.k(x), x)


def failure(*args: object, **options: object) -> str:
    with pytest.raises(AssertionError) as caught:
        assert_attention(*args, **options)  # type: ignore[arg-type]
    return str(caught.value)


def difference(*args: object, **options: object) -> str:
    with pytest.raises(AssertionError) as caught:
        assert_same_attention(*args, **options)  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("mistake", [name for name in PLANTED if name not in ("cosine", "length_factor")])
def test_a_failure_is_a_diff(mistake: str) -> None:
    healthy, inputs = planted("rope", None)
    wrong, own = planted("rope", mistake)
    text = failure(wrong, own, fail_on="warn")
    formula = assert_attention(healthy, inputs).calls[0].call.formula
    assert f"unexplained: {mistake}" in text
    assert "- found: " in text
    assert f"+ expected: {formula}" in text
    assert "fix: " in text
    assert "layers." in text


@pytest.mark.parametrize("form", [lambda x: x, lambda x: (x,), lambda x: [x], lambda x: {"x": x}])
def test_inputs_as_torch_users_pass_them(form: object) -> None:
    model, (x,) = planted("eager", None)
    assert len(assert_attention(model, form(x)).calls) == 3  # type: ignore[operator]
    assert assert_same_attention(model, model, form(x)).same  # type: ignore[operator]


def test_what_is_allowed_stands_and_nothing_else() -> None:
    model, inputs = planted("eager", "missing")
    for allow in ("missing", "unexplained", "layers.*", ("layers.0", "layers.1", "layers.2"), "scale_ledger"):
        assert_attention(model, inputs, allow=allow)
    text = failure(model, inputs, allow=("layers.0", "layers.2", "twice"))
    assert "layers.1  fail" in text
    assert "layers.0" not in text
    assert "1 finding; 3 attentions ran" in text
    assert_attention(model, inputs, fail_on="never")
    assert_attention(model, inputs, fail_on="critical")


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"allow": "layers.7"}, InvalidValueError, "layers.7"),
        ({"allow": ("mising",)}, InvalidValueError, "mising"),
        ({"allow": 3}, InvalidTypeError, "allow is 3"),
        ({"fail_on": "error"}, InvalidValueError, "fail_on is 'error'"),
        ({"inputs": 3}, InvalidTypeError, "inputs are a int"),
    ],
)
def test_bad_options_are_one_clear_error(options: dict[str, object], kind: type[Exception], said: str) -> None:
    model, inputs = planted("eager", "missing")
    with pytest.raises(kind, match=said) as caught:
        assert_attention(model, **({"inputs": inputs} | options))  # type: ignore[arg-type]
    assert caught.value.hint  # type: ignore[attr-defined]


@pytest.mark.parametrize("fail_on", ["fail", "critical", "unmeasured"])
def test_what_was_not_judged_never_passes_silently(fail_on: str) -> None:
    text = failure(Odd(), torch.randn(2, 5, 16), fail_on=fail_on)
    assert "1 attention not judged; 1 attention ran" in text
    assert "(root)" in text
    assert "sort" in text
    assert_attention(Odd(), torch.randn(2, 5, 16), fail_on=fail_on, allow="unmeasured")
    assert_attention(Odd(), torch.randn(2, 5, 16), fail_on="never")


def test_a_model_without_attention_is_an_error() -> None:
    with pytest.raises(ModelError, match="no attention"):
        assert_attention(nn.Linear(4, 4), torch.ones(1, 4))


def test_names_of_strangers_do_not_reach_the_terminal() -> None:
    model = nn.ModuleDict({"a\x1b[31m": planted("eager", "missing")[0]})
    model.forward = lambda x: model["a\x1b[31m"](x)  # type: ignore[method-assign]
    text = failure(model, torch.randn(1, 4, WIDTH))
    assert "\x1b" not in text
    assert r"a\x1b[31m.layers" in text


def test_the_same_model_is_the_same() -> None:
    model, inputs = planted("gqa", None)
    assert assert_same_attention(model, planted("gqa", None)[0], inputs).same


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mistake", ["missing", "twice", "inverted"])
def test_a_difference_names_site_formulas_and_cause(mistake: str) -> None:
    (a, inputs), (b, _) = planted("rope", None), planted("rope", mistake)
    text = difference(a, b, inputs)
    formulas = [assert_attention(m, inputs, fail_on="never").calls[0].call.formula for m in (a, b)]
    assert f"{SITES}  differs at: scale" in text
    assert f"- B, found:    {formulas[1]}" in text
    assert f"+ A, expected: {formulas[0]}" in text
    assert re.search(r"fix: in B, make 0\.\d+ the only factor on q @ k.mT, as ", text)
    assert_same_attention(a, b, inputs, allow="scale")
    assert_same_attention(a, b, inputs, allow="layers.*")
    assert "layers.1 " in difference(a, b, inputs, allow=("layers.0", "layers.2", "softcap"))
    with pytest.raises(InvalidValueError, match="scal'"):
        assert_same_attention(a, b, inputs, allow="scal")


def test_calls_without_a_partner_fail() -> None:
    a, inputs = planted("eager", None)
    b, _ = planted("eager", None)
    b.layers = b.layers[:2]  # type: ignore[assignment,index]
    of_both = {"layers.0": "layers.0", "layers.1": "layers.1"}
    text = difference(a, b, inputs, mapping=of_both)
    assert "1 attention without a partner" in text
    assert "layers.2  only in A" in text
    assert_same_attention(a, b, inputs, mapping=of_both, allow="unpaired")
    assert_same_attention(a, b, inputs, mapping=of_both, allow="layers.2")


@torch.no_grad()
def test_outputs_that_differ_fail_though_the_attentions_agree() -> None:
    (a, inputs), (b, _) = planted("eager", None), planted("eager", None)
    b.register_forward_hook(lambda _, __, output: 2 * output)
    text = difference(a, b, inputs)
    assert "1 output of 1 not the same" in text
    assert "output 0  differs by 100%, rounding allows " in text
    assert_same_attention(a, b, inputs, attention_only=True)
    with pytest.raises(AssertionError):
        assert_same_attention(a, b, inputs, allow=("scale", "layers.*"))


@pytest.mark.full
def test_outputs_that_follow_from_what_is_allowed_may_differ() -> None:
    (a, inputs), (b, _) = planted("rope", None), planted("rope", "missing")
    assert not assert_same_attention(a, b, inputs, allow="scale").same
    b.register_forward_hook(lambda _, __, output: 2 * output)
    assert "1 output of 1 not the same" in difference(a, b, inputs, allow="scale")


class Whole(nn.Module):
    """A model that is one attention, which can't be put in the place of another."""

    def __init__(self, scale: float | None, factor: float = 1.0) -> None:
        super().__init__()
        self.q, self.k, self.scale, self.factor = nn.Linear(16, 16), nn.Linear(16, 16), scale, factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * functional.scaled_dot_product_attention(self.q(x), self.k(x), x, scale=self.scale)


def test_an_output_whose_way_is_not_known_is_not_forgiven() -> None:
    torch.manual_seed(3)
    a = Whole(None)
    b = Whole(1.0, factor=2.0)
    b.load_state_dict(a.state_dict())
    x = torch.randn(2, 5, 16)
    assert "1 output of 1 not the same" in difference(a, b, x, allow="scale")
    assert_same_attention(a, b, x, allow="scale", attention_only=True)


def test_no_global_hook_is_left_where_models_were_collected() -> None:
    tables = {name: value for name, value in vars(torch_module).items() if name.startswith("_global_")}
    before = {name: len(value) for name, value in tables.items() if hasattr(value, "__len__")}
    with CalledModels() as called:
        nn.Linear(2, 2)(torch.ones(1, 2))
    assert len(called.calls) == 1
    assert {name: len(value) for name, value in tables.items() if hasattr(value, "__len__")} == before

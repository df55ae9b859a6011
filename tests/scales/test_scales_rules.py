"""Every rule against its formula in plain numbers, the learned one's gradients, and what is refused."""

from __future__ import annotations

import copy
import math
import pickle
import re
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sqrtdk import scales
from sqrtdk.errors import InvalidTypeError, InvalidValueError, SqrtdkError
from sqrtdk.scales import ScaleRule, sizes
from tests.tolerances import allowed, complaint

# of a number of tensors that a logarithm or an exponential of at most 2 went into
SINGLE, DOUBLE = (allowed(dtype, length=1, logit=2.0, magnitude=1.0) for dtype in (torch.float32, torch.float64))

# rule, head dim, beta worked out by hand
LITERAL = {
    "sqrt_dk": (scales.sqrt_dk(), 64, 0.125),
    "sqrt_dk of one": (scales.sqrt_dk(), 1, 1.0),
    "sqrt_dk odd": (scales.sqrt_dk(), 81, 1 / 9),
    "none": (scales.none(), 64, 1.0),
    "dk": (scales.dk(), 64, 0.015625),
    "dk alpha": (scales.dk(alpha=2.0), 64, 0.03125),
    "two_sqrt_dk": (scales.two_sqrt_dk(), 64, 0.0625),
    "fixed": (scales.fixed(0.3), 64, 0.3),
    "fixed int": (scales.fixed(2), 64, 2.0),
    "fixed zero": (scales.fixed(0.0), 64, 0.0),
    "fixed negative": (scales.fixed(-0.5), 64, -0.5),
    "temperature": (scales.temperature(4.0), 64, 0.03125),
    "temperature sharp": (scales.temperature(0.5), 64, 0.25),
    "yarn": (scales.yarn(1.5), 64, 0.28125),
    "disentangled": (scales.disentangled(4), 64, 0.0625),
    "disentangled of three": (scales.disentangled(3), 12, 1 / 6),
    "layer_index first": (scales.layer_index(0), 64, 0.125),
    "layer_index": (scales.layer_index(3), 64, 0.03125),
}
RULES = {name: rule for name, (rule, _, _) in LITERAL.items()} | {
    "log_n": scales.log_n(),
    "log_m n": scales.log_n(base=512),
    "learned": scales.learned(1),
}


@pytest.mark.parametrize(("rule", "head_dim", "expected"), LITERAL.values(), ids=LITERAL)
def test_the_formula(rule: ScaleRule, head_dim: int, expected: float) -> None:
    beta = rule.beta(sizes(head_dim, heads=3, query_len=5, key_len=7))
    assert isinstance(beta, float)
    assert beta == pytest.approx(expected, rel=2e-16, abs=0.0)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_rule_is_a_rule(rule: ScaleRule) -> None:
    assert isinstance(rule, ScaleRule)
    assert isinstance(rule.beta(sizes(16)), float | torch.Tensor)


def test_rules_are_values() -> None:
    for rule, _, _ in LITERAL.values():
        twin = pickle.loads(pickle.dumps(rule))
        assert twin == rule
        assert hash(twin) == hash(rule)
        assert twin is not rule
    assert scales.fixed(0.1) != scales.fixed(0.2)
    with pytest.raises(AttributeError):
        scales.fixed(0.1).value = 0.2  # type: ignore[misc]


def test_the_table_holds_every_rule() -> None:
    assert list(scales.SCALES) == [
        "sqrt_dk",
        "none",
        "dk",
        "two_sqrt_dk",
        "fixed",
        "temperature",
        "learned",
        "log_n",
        "yarn",
        "disentangled",
        "layer_index",
    ]
    for name, make in scales.SCALES.items():
        assert make is getattr(scales, name)


def test_the_numbers_that_a_rule_takes() -> None:
    for number in (2, 2.0, np.float32(2), np.int64(2), Fraction(2)):
        found = scales.fixed(number)
        assert (found.value, type(found.value)) == (2.0, float)
    assert scales.disentangled(np.int64(3)) == scales.disentangled(3)


def test_two_sqrt_dk_is_a_temperature_of_two() -> None:
    for head_dim in (1, 7, 64, 80):
        at = sizes(head_dim)
        assert scales.two_sqrt_dk().beta(at) == pytest.approx(scales.temperature(2).beta(at), rel=2e-16)


# log n


def test_log_n_counts_the_keys_of_each_row() -> None:
    visible = torch.arange(1, 6, dtype=torch.float64).reshape(5, 1)
    beta = scales.log_n(s=0.5).beta(sizes(16, heads=2, query_len=5, key_len=5, visible=visible, dtype=torch.float64))
    assert beta.dtype == torch.float64
    assert beta.shape == (5, 1)
    assert beta.flatten().tolist() == pytest.approx([0.5 * math.log(n) / 4 for n in range(1, 6)], rel=DOUBLE)


def test_log_n_in_another_base_is_the_textbook_scale_at_that_length() -> None:
    at = sizes(64, key_len=512, dtype=torch.float64)
    assert scales.log_n(base=512).beta(at).item() == pytest.approx(0.125, rel=DOUBLE)
    longer = sizes(64, key_len=512**2, dtype=torch.float64)
    assert scales.log_n(base=512).beta(longer).item() == pytest.approx(0.25, rel=DOUBLE)


def test_log_n_of_rows_with_one_key_or_none_is_zero() -> None:
    beta = scales.log_n().beta(sizes(4, key_len=3, visible=torch.tensor([[0], [1], [3]])))
    assert beta.dtype == torch.float32
    assert beta.flatten().tolist() == pytest.approx([0.0, 0.0, math.log(3) / 2], rel=SINGLE)


@given(n=st.integers(2, 10**6), s=st.floats(0.01, 10.0))
def test_log_n_keeps_the_shape_of_a_spike(n: int, s: float) -> None:
    # One key ahead of n - 1 equal ones by a margin m: its weight is 1 / (1 + (n - 1) n^(-s m)), so that at s m = 1 it
    # stays within [1/2, 2/3] at every length, whereas a fixed scale lets it go to 0.
    beta = scales.log_n(s=s).beta(sizes(1, key_len=n, dtype=torch.float64)).item()
    weight = 1.0 / (1.0 + (n - 1) * math.exp(-beta / s))
    assert 0.5 <= weight <= 2 / 3


# yarn


def test_yarn_mscale_of_the_papers() -> None:
    assert scales.yarn_mscale(40.0) == pytest.approx(1.368887945411394, rel=1e-15)
    assert scales.yarn_mscale(40.0, 0.707) == pytest.approx(1.2608037774058556, rel=1e-15)  # DeepSeek-V2
    assert scales.yarn_mscale(1.0) == scales.yarn_mscale(0.25) == 1.0
    assert scales.yarn_mscale(16.0, 0.0) == 1.0


# learned


def test_a_learned_scale_starts_at_its_rule() -> None:
    for init in (scales.sqrt_dk(), scales.fixed(0.3), scales.none()):
        at = sizes(64, heads=3)
        beta = scales.learned(3, init=init).beta(at)
        assert beta.shape == (3, 1, 1)
        assert beta.flatten().tolist() == pytest.approx([init.beta(at)] * 3, rel=SINGLE)
    assert scales.learned(2).rule == scales.sqrt_dk()


def test_a_learned_scale_has_a_factor_a_head() -> None:
    rule = scales.learned(2, init=scales.fixed(0.5), dtype=torch.float64)
    with torch.no_grad():
        rule.log_factor.copy_(torch.tensor([0.0, math.log(3.0)], dtype=torch.float64))
    beta = rule.beta(sizes(64, heads=2, query_len=4))
    assert beta.dtype == torch.float64
    assert beta.flatten().tolist() == pytest.approx([0.5, 1.5], rel=DOUBLE)


def test_a_learned_scale_over_log_n_has_heads_and_rows() -> None:
    rule = scales.learned(2, init=scales.log_n(), dtype=torch.float64)
    visible = torch.tensor([[1.0], [2.0], [3.0]])
    beta = rule.beta(sizes(4, heads=2, query_len=3, key_len=3, visible=visible, dtype=torch.float64))
    assert beta.shape == (2, 3, 1)
    assert beta[1].flatten().tolist() == pytest.approx([0.0, math.log(2) / 2, math.log(3) / 2], rel=DOUBLE)


def test_one_learned_factor_serves_any_heads_and_adds_no_dimension() -> None:
    rule = scales.learned(1)
    for heads in (1, 5):
        assert rule.beta(sizes(64, heads=heads)).shape == (1, 1)


def test_the_gradient_of_a_learned_scale() -> None:
    rule = scales.learned(3, init=scales.log_n(s=0.7), dtype=torch.float64)
    with torch.no_grad():
        rule.log_factor.uniform_(-1, 1)
    visible = torch.arange(1.0, 5.0).reshape(4, 1)
    at = sizes(5, heads=3, query_len=4, key_len=4, visible=visible, dtype=torch.float64)

    def beta(theta: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(_Beta(rule), {"rule.log_factor": theta}, (at,))

    theta = rule.log_factor.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(beta, theta)
    assert torch.autograd.gradgradcheck(beta, theta)
    # and by hand: the derivative of exp(theta) beta by theta is itself
    rule.beta(at).sum().backward()
    beta_HL1 = rule.beta(at).detach()
    assert complaint(rule.log_factor.grad, beta_HL1.sum((1, 2)), torch.float64, length=1, logit=1.0, uses=4) is None


def test_a_learned_scale_of_a_learned_scale_trains_both() -> None:
    inner = scales.learned(1)
    outer = scales.learned(2, init=inner)
    outer.beta(sizes(4, heads=2)).sum().backward()
    assert [name for name, _ in outer.named_parameters()] == ["log_factor", "rule.log_factor"]
    assert outer.log_factor.grad.tolist() == [0.5, 0.5]
    assert inner.log_factor.grad.tolist() == [1.0]


def test_a_learned_scale_is_saved_and_shown() -> None:
    rule = scales.learned(2)
    with torch.no_grad():
        rule.log_factor.add_(1.0)
    twin = scales.learned(2)
    twin.load_state_dict(rule.state_dict())
    assert torch.equal(twin.beta(sizes(4, heads=2)), rule.beta(sizes(4, heads=2)))
    assert repr(rule) == "Learned(heads=2, rule=SqrtDk())"


class _Beta(torch.nn.Module):
    def __init__(self, rule: scales.Learned) -> None:
        super().__init__()
        self.rule = rule

    def forward(self, at: scales.Sizes) -> torch.Tensor:
        return self.rule.beta(at)


# devices and compilers


def test_rules_of_tensors_on_meta() -> None:
    at = sizes(64, heads=4, query_len=3, key_len=9, device="meta")
    assert scales.log_n().beta(at).device.type == "meta"
    assert scales.learned(4, device="meta").beta(at).shape == (4, 1, 1)


ARGUMENTS = {"fixed": (0.3,), "temperature": (2.0,), "learned": (4,), "yarn": (1.2,), "disentangled": (3,)}
ARGUMENTS |= {"layer_index": (2,)}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", scales.SCALES)
def test_a_rule_compiles_without_a_break_for_any_size(name: str) -> None:
    make, arguments = scales.SCALES[name], ARGUMENTS.get(name, ())
    outside = make(*arguments)

    def scaled(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        rule = outside if name == "learned" else make(*arguments)
        heads, length, head_dim = query.shape[-3:]
        keys = key.shape[-2]
        return query * rule.beta(sizes(head_dim, heads, length, keys)) * outside.beta(sizes(head_dim, heads))

    query, key = torch.randn(2, 4, 3, 6), torch.randn(2, 4, 5, 6)
    torch.compiler.reset()
    compiled = torch.compile(scaled, fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(compiled(query, key), scaled(query, key))


# what is refused

NUMBERS = {
    "alpha of dk": scales.dk,
    "a fixed scale": scales.fixed,
    "a temperature": scales.temperature,
    "s of log_n": scales.log_n,
    "the base of log_n": lambda base: scales.log_n(base=base),
    "mscale of yarn": scales.yarn,
    "the factor of yarn_mscale": scales.yarn_mscale,
    "m of yarn_mscale": lambda m: scales.yarn_mscale(4.0, m),
}
INTEGERS = {
    "terms of disentangled": (scales.disentangled, 1),
    "the layer of layer_index": (scales.layer_index, 0),
    "heads of a learned scale": (scales.learned, 1),
}


def refused(kind: type[SqrtdkError], message: str, make: object, *arguments: object) -> None:
    with pytest.raises(kind, match=f"(?m)^{re.escape(message)}$") as caught:
        make(*arguments)  # type: ignore[operator]
    assert caught.value.hint


@pytest.mark.parametrize(("name", "make"), NUMBERS.items(), ids=NUMBERS)
def test_what_is_no_finite_number_is_refused(name: str, make: object) -> None:
    for bad in (math.nan, math.inf, -math.inf):
        refused(InvalidValueError, f"{name} is a finite number; got {bad}", make, bad)
    refused(InvalidValueError, f"{name} is a finite number; got inf", make, 10**400)
    for bad, shown in (
        (True, "True (bool)"),
        ("0.5", "'0.5' (str)"),
        (None, "None (NoneType)"),
        (np.True_, f"a {type(np.True_).__name__}"),
        (torch.tensor(0.5), "a Tensor"),
        (1j, "a complex"),
        (Decimal("0.5"), "a Decimal"),
        ([0.5], "a list"),
    ):
        refused(InvalidTypeError, f"{name} is a real number; got {shown}", make, bad)


@pytest.mark.parametrize(("name", "make"), {name: make for name, (make, _) in INTEGERS.items()}.items(), ids=INTEGERS)
def test_what_is_no_whole_number_is_refused(name: str, make: object) -> None:
    for bad, shown in ((True, "True (bool)"), (2.0, "2.0 (float)"), ("2", "'2' (str)"), (torch.tensor(2), "a Tensor")):
        refused(InvalidTypeError, f"{name} is a whole number; got {shown}", make, bad)
    least = INTEGERS[name][1]
    refused(InvalidValueError, f"{name} is at least {least}; got {least - 1}", make, least - 1)


@pytest.mark.parametrize("name", ["a temperature", "mscale of yarn", "the factor of yarn_mscale"])
def test_what_has_to_be_positive(name: str) -> None:
    for bad in (0, 0.0, -2.0):
        refused(InvalidValueError, f"{name} is above 0; got {float(bad)}", NUMBERS[name], bad)


def test_bases_and_rules_that_are_none() -> None:
    for base in (1, 0.5, 0, -2.0):
        message = f"the base of log_n is above 1; got {float(base)}"
        refused(InvalidValueError, message, NUMBERS["the base of log_n"], base)
    refused(InvalidTypeError, "init of a learned scale is a scale rule; got float", scales.learned, 4, 0.5)
    refused(InvalidTypeError, "init of a learned scale is a scale rule; got function", scales.learned, 4, scales.none)


def test_a_learned_scale_of_other_heads_is_refused() -> None:
    message = "a learned scale has a factor for each query head, or one; got 4 for 8 heads"
    refused(InvalidValueError, message, scales.learned(4).beta, sizes(64, heads=8))


@pytest.mark.parametrize("visible", [None, torch.tensor([[3.0], [5.0]])])
def test_sizes_are_copied_and_sent_to_another_process(visible: torch.Tensor | None) -> None:
    made = scales.sizes(8, heads=2, query_len=2, key_len=5, visible=visible)
    for again in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
        assert torch.equal(again.visible_keys(), made.visible_keys())
        assert torch.equal(scales.log_n().beta(again), scales.log_n().beta(made))

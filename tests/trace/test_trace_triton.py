"""The Triton kernel is read as the dense formula that it runs, and as the compiled kernel is read."""

from __future__ import annotations

import pytest

from sqrtdk.impl.gpu.load import interpreted
from tests.attentions.compiled import CASES, checked, told
from tests.trace.kernel_by_hand import both, check_mask, check_same, check_statistics

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not interpreted(), reason="a GPU is there, and Triton's interpreter is not asked for"),
]


@pytest.mark.parametrize("name", CASES)
def test_a_call_is_read_as_the_dense_formula(name: str) -> None:
    for grad in (False, True) if name in ("bias", "gain_softcap", "sinks") else (False,):
        dense, kernel = both(name, "triton", grad)
        check_same(dense, kernel, fit=False)
        if not grad:
            check_mask(dense, kernel)
            check_statistics(dense, kernel)
        assert (kernel.formula, kernel.op) == (CASES[name].formula, "sqrtdk_gpu.forward")


@pytest.mark.parametrize("name", ["grouped", "gain_a_head", "twice", "bool_inverted", "alibi", "sinks_and_window"])
def test_verdicts_are_those_of_the_dense_call(name: str) -> None:
    one = CASES[name]
    dense, kernel = (checked(one.model(impl), one.inputs()) for impl in ("dense", "triton"))
    assert told(kernel) == told(dense)

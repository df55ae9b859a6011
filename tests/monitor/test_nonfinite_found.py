"""What a search for numbers that are not finite says of one tensor, and of the finds of several ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sqrtdk.monitor import first_nonfinite as law
from sqrtdk.monitor.alarms.nonfinite import nonfinite_alarm
from sqrtdk.monitor.first_nonfinite import FirstNonfinite, NonfiniteSearch
from sqrtdk.monitor.samples import StepSample
from sqrtdk.monitor.shards import RankAxis, join_ranks
from sqrtdk.monitor.sums import WatchedCall, WatchedStep

# -- one tensor --------------------------------------------------------------------------------------------------------


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "float64": torch.Tensor.double,
    "float16": torch.Tensor.half,
    "bfloat16": torch.Tensor.bfloat16,
    "float8": lambda x: x.to(torch.float8_e5m2),
    "complex": lambda x: torch.complex(x, x).conj(),
    "strides": lambda x: x.mT[::2].expand(3, -1, -1, -1),
    "sparse": torch.Tensor.to_sparse,
    "jagged": lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged),
    "inference": torch.Tensor.clone,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [0.0, -math.inf, math.inf, math.nan])
def test_states_are_those_of_every_number(kind: str, number: float) -> None:
    x = torch.randn(4, 3, 6)
    x[2, 0, 4] = number  # among those that the strides leave
    with torch.inference_mode(kind == "inference"):
        made = KINDS[kind](x)
    if kind == "complex" and number:
        number = math.nan  # which has no order
    expected = law.BAD if not number < math.inf else law.MINUS if number == -math.inf else law.FINITE
    search = NonfiniteSearch()
    with search._looking():
        assert [search._look(made), search._look(made)] == ([0, 1] if kind == "inference" else [0, 0])
        search._judge()
    assert set(search._transferred().values()) == {expected}
    assert search.failures == []


@pytest.mark.parametrize(
    "made", [torch.arange(3), torch.ones(0), torch.ones(2, device="meta"), torch.ones(2, dtype=torch.bool)]
)
def test_what_holds_no_floats_is_passed_by(made: Tensor) -> None:
    search = NonfiniteSearch()
    with search._looking():
        assert search._look(made) is None
    assert search.failures == []


# -- several ranks -----------------------------------------------------------------------------------------------------


def test_the_first_of_several_ranks() -> None:
    def step(first: FirstNonfinite | None) -> WatchedStep:
        return WatchedStep((), "as is", first=first, modules=3)

    late = FirstNonfinite("b", "Linear", "", law.FROM_FINITE, "", True, None, (0, 5))
    early, second = replace(late, site="a", order=(0, 2)), replace(late, site="c", order=(1, 0))
    away = replace(late, site="d", order=(0, 0), returned=False)
    ruled_out = replace(late, cause=law.RULED_OUT, order=(0, 0))

    def found(shards: str, *firsts: FirstNonfinite | None) -> tuple[str, int | None] | None:
        first = join_ranks([step(one) for one in firsts], [RankAxis(len(firsts), shards)]).first
        return None if first is None else (first.site, first.rank)

    assert found("rows", None, None) is None
    assert found("rows", None, late) == ("b", 1)
    assert found("rows", late, early) == ("a", 1)
    assert found("rows", early, early) == ("a", None)
    assert found("rows", second, late) == ("b", 1)
    assert found("rows", away, late) == ("b", 1)
    assert found("rows", ruled_out, late) == ("b", 1)
    assert found("stages", late, early) == ("b", None)


def test_stages_of_one_name_are_told_apart() -> None:
    call = WatchedCall("layers.0", 0, 2, 1.0, "softmax(q.k)", None)
    first = FirstNonfinite("layers.0.out", "Linear", "", law.CAUSE_BETWEEN, "layers.0.v", True, call.place, (0, 5))
    steps = [WatchedStep((call,), "as is", first=one) for one in (None, first)]
    seen = join_ranks(steps, [RankAxis(2, "stages")])
    sample = StepSample(1, seen.samples(), loss=math.nan, first=seen.first, modules=seen.modules)
    (alarm,) = nonfinite_alarm((), sample)
    assert sample.first is not None
    assert sample.first.before in [one.place for one in sample.calls]
    assert "that of stage1.layers.0.out (Linear)" in alarm.text
    assert "and stage1.layers.0.v was the last to return before" in alarm.text

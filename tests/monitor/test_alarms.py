"""Each alarm on samples whose numbers are known: told at its bar, not below it, and once."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest

from sqrtdk.audit.rules.statistics import frozen_entropy
from sqrtdk.monitor.alarms import ALARM_RULES, fresh, holding, idle
from sqrtdk.monitor.alarms.lost import unmeasured_alarms
from sqrtdk.monitor.alarms.nonfinite import nonfinite_alarm
from sqrtdk.monitor.alarms.trend import LEAST_POINTS, passing
from sqrtdk.monitor.samples import Alarm, CallSample, StepSample, not_measured

HEALTHY = {
    "rows": 128.0,
    "nan_rows": 0.0,
    "inf_rows": 0.0,
    "keys": 64.0,
    "max_logit": 4.0,
    "row_offset": 0.5,
    "entropy_nats": 3.0,
    "entropy_fraction": 0.7,
    "std_logit": 1.0,
    "peak": 0.2,
    "saturated": 0.0,
    "stored_product": 16.0,
    "query_nonfinite": 0.0,
    "key_nonfinite": 0.0,
    "query_grad_nonfinite": 0.0,
    "key_grad_nonfinite": 0.0,
    "blind_rows": 0.0,
}
FORMULA = "softmax(0.25 * q.k + causal)"


def call(site: str = "a", heads: int = 2, **changes: object) -> CallSample:
    """An attention in health, but for columns (a number, or one a head) and attributes that are changed."""
    columns = {name: [value] * heads for name, value in HEALTHY.items()}
    for name in [name for name in changes if name in columns]:
        value = changes.pop(name)
        columns[name] = list(value) if isinstance(value, list) else [value] * heads  # type: ignore[list-item]
    sample = CallSample(site, 0, heads, columns, 1.0, FORMULA, factors=("logits: number",), stored=True)
    return replace(sample, **changes)  # type: ignore[arg-type]


def run(*steps: CallSample | Sequence[CallSample], every: int = 10) -> list[Alarm]:
    """All alarms of a run whose samples are given."""
    before: list[StepSample] = []
    told: list[Alarm] = []
    for number, calls in enumerate(steps):
        calls = (calls,) if isinstance(calls, CallSample) else tuple(calls)
        now = StepSample(max(1, number * every), calls)
        told += fresh(holding(before, now), told)
        before.append(now)
    return told


def brief(alarms: Iterable[Alarm]) -> list[tuple[str, str, int]]:
    return [(alarm.name, alarm.severity, alarm.step) for alarm in alarms]


def test_a_healthy_run_has_no_alarm() -> None:
    steps = [[call("a", max_logit=4.0 + 0.01 * i), call("b")] for i in range(30)]
    assert run(*steps) == []


@pytest.mark.parametrize("name", ALARM_RULES)
def test_no_alarm_without_columns(name: str) -> None:
    empty = replace(call(), columns={})
    assert list(ALARM_RULES[name].judge((StepSample(1, (empty,)),), StepSample(2, (empty,)))) == []


def test_equal_logits_are_an_alarm_from_the_first_sample_on() -> None:
    """A buffer in front of q and k was erased."""
    erased = {"std_logit": 0.0, "entropy_fraction": 1.0, "max_logit": 0.0}
    (alarm,) = run(call("a", **erased), call("a", **erased))
    assert (alarm.name, alarm.severity, alarm.step, alarm.site) == ("equal_logits", "warn", 1, "a")
    assert run(call("a", std_logit=[0.0, 1e-3], entropy_fraction=1.0)) == []
    assert run(call("a", keys=1.0, **erased)) == []  # a row of one key has no choice


def test_largest_logit_at_each_bar_once() -> None:
    values = [4.0, 50.0, 51.0, 60.0, 99.0, 150.0, 60.0, 1001.0, 2e4]
    alarms = [alarm for alarm in run(*(call(max_logit=[1.0, v]) for v in values)) if alarm.name == "max_logit"]
    assert [(a.severity, a.step, a.head, a.value, a.bar) for a in alarms] == [
        ("note", 20, 1, 51.0, 50.0),
        ("warn", 50, 1, 150.0, 100.0),
        ("fail", 70, 1, 1001.0, 1e3),
        ("critical", 80, 1, 2e4, 1e4),
    ]


def test_each_attention_is_told_of_its_own() -> None:
    alarms = run([call("a", max_logit=60.0), call("b")], [call("a", max_logit=60.0), call("b", max_logit=60.0)])
    assert [(alarm.site, alarm.step) for alarm in alarms] == [("a", 1), ("b", 10)]


def test_growth_is_told_before_the_bar_and_its_interval_holds_the_passing() -> None:
    """30 e^(step / 200) passes 50 at step 102 and 100 at step 241."""
    noise = random.Random(0)
    values = [30.0 * math.exp(i * 10 / 200 + noise.gauss(0, 0.02)) for i in range(24)]
    alarms = [alarm for alarm in run(*(call(max_logit=value) for value in values)) if alarm.name == "growth"]
    assert [(alarm.severity, alarm.bar) for alarm in alarms] == [("note", 50.0), ("warn", 100.0)]
    for alarm, step in zip(alarms, (102, 241), strict=True):
        assert alarm.step < step
        earliest, latest = map(int, alarm.text.rsplit("(", 1)[1].rstrip(")").split(" to "))
        assert earliest <= step <= latest


@pytest.mark.parametrize("shape", ["noise", "flattens", "falls", "small"])
def test_growth_is_not_told_of(shape: str) -> None:
    noise = random.Random(1)
    series = {
        "noise": lambda i: 40.0 + noise.gauss(0, 5.0),
        "flattens": lambda i: 45.0 * (1 - math.exp(-i / 3)) + 0.1,
        "falls": lambda i: 49.0 - i,
        "small": lambda i: 0.5 * 1.2**i,  # from 0.5 to 24: a warm-up
    }[shape]
    alarms = run(*(call(max_logit=series(i)) for i in range(22)))
    assert [alarm for alarm in alarms if alarm.name == "growth"] == []


def test_an_interval_of_a_passing_holds_it_as_often_as_it_says() -> None:
    """300 lines with Gaussian scatter: at the level of 99% more than 12 misses have a chance below 1 in 10^4."""
    noise, misses, answers = random.Random(2), 0, 0
    steps = range(0, 160, 10)
    for _ in range(300):
        found = passing(steps, [0.01 * step + noise.gauss(0, 0.05) for step in steps], 2.4)  # passes at 240
        if found is not None:
            answers += 1
            misses += not found.earliest <= 240 <= found.latest
    assert answers > 200
    assert misses <= 12


def test_one_wild_sample_moves_no_line() -> None:
    values = [0.01 * step for step in range(0, 160, 10)]
    values[5] = 100.0
    found = passing(range(0, 160, 10), values, 2.4)
    assert found is not None
    assert found.step == pytest.approx(240)


def test_few_samples_are_no_trend() -> None:
    steps = range(LEAST_POINTS - 1)
    assert passing(steps, [float(step) for step in steps], LEAST_POINTS) is None
    assert passing(range(LEAST_POINTS), [float(step) for step in range(LEAST_POINTS)], LEAST_POINTS) is not None


@pytest.mark.parametrize(("low", "severity"), [(1, None), (2, "note"), (5, "note"), (6, "warn")])
def test_entropy_by_the_share_of_heads(low: int, severity: str | None) -> None:
    bar = frozen_entropy(64)
    values = [bar - 0.01] * low + [bar + 0.01] * (8 - low)
    alarms = [alarm for alarm in run(call(heads=8, entropy_nats=values)) if alarm.name == "entropy"]
    assert [alarm.severity for alarm in alarms] == ([severity] if severity else [])
    assert all(alarm.bar == bar for alarm in alarms)
    told = f"{low} of 8 heads spread their weight over too few keys at step 1 (low entropy); lowest: "
    assert all(alarm.text.startswith(told) for alarm in alarms)
    assert all(alarm.text.endswith(f"{bar - 0.01:.3g} nats, where at least {bar:.3g} is healthy") for alarm in alarms)


def test_entropy_of_normalised_q_and_k_has_the_bar_of_their_scale() -> None:
    low = call(entropy_nats=frozen_entropy(64) - 0.1)
    assert brief(run(low)) == [("entropy", "warn", 1)]
    assert run(replace(low, norm_sigma=8.0)) == []


def test_falling_entropy_is_told_before_its_bar() -> None:
    bar = frozen_entropy(64)
    alarms = run(*(call(entropy_nats=bar * 2.0 ** (1 - i / 20)) for i in range(25)))
    trend, *rest = [alarm for alarm in alarms if alarm.name == "entropy_trend"]
    level = next(alarm for alarm in alarms if alarm.name == "entropy")
    assert rest == []
    assert trend.severity == "note"
    assert trend.text.endswith("half of the heads spread their weight over too few keys")
    assert trend.step < 200 < level.step + 10  # the bar is met at step 200


@pytest.mark.parametrize(("hot", "severity"), [(0, None), (1, "note"), (4, "note"), (5, "warn")])
def test_saturated_heads(hot: int, severity: str | None) -> None:
    alarms = run(call(heads=8, saturated=[0.51] * hot + [0.5] * (8 - hot)))
    assert brief(alarms) == ([("saturation", severity, 1)] if severity else [])


@pytest.mark.parametrize(
    ("dtype", "product", "severity"),
    [
        ("float16", 32767.0, None),
        ("float16", 32768.0, "warn"),
        ("float16", 65504.0, "warn"),
        ("float16", math.inf, "fail"),
        ("float32", 65504.0, None),
        ("float32", 65505.0, "warn"),
        ("float32", math.inf, None),
    ],
)
def test_the_range_of_float16(dtype: str, product: float, severity: str | None) -> None:
    one = call(stored_product=product, logits_dtype=dtype)
    assert brief(run(one)) == ([("fp16_range", severity, 1)] if severity else [])
    assert run(call(stored_product=math.nan, logits_dtype=dtype)) == []  # of a fused kernel


def test_growth_towards_the_end_of_float16() -> None:
    steps = [call(stored_product=2000.0 * 2.0 ** (i / 4), logits_dtype="float16") for i in range(18)]
    alarms = run(*steps)
    assert brief(alarms)[:1] == [("fp16_range", "warn", 110)]
    assert "passes 65504" in alarms[0].text
    assert run(*(replace(one, logits_dtype="bfloat16") for one in steps)) == []


@pytest.mark.parametrize(("dtype", "severity"), [("bfloat16", "warn"), ("float32", "note")])
def test_row_offsets(dtype: str, severity: str) -> None:
    assert run(call(row_offset=50.0, logits_dtype=dtype)) == []
    assert brief(run(call(row_offset=[1.0, 51.0], logits_dtype=dtype))) == [("bf16_offset", severity, 1)]
    assert run(call(row_offset=51.0, logits_dtype=dtype, stored=False)) == []


def test_the_first_attention_that_is_not_finite() -> None:
    sick = call("b", nan_rows=[0.0, 3.0], key_nonfinite=2.0)
    alarms = run([call("a"), call("b"), call("c")], [call("a"), sick, call("c", nan_rows=128.0)], [call("a"), sick])
    (alarm,) = [alarm for alarm in alarms if alarm.name == "nonfinite"]
    assert (alarm.severity, alarm.site, alarm.step, alarm.head, alarm.value) == ("critical", "b", 10, 1, 3.0)
    assert "2 numbers of k" in alarm.text
    assert len(list(nonfinite_alarm((), StepSample(1, (sick, sick))))) == 1
    (overflow,) = run(call(inf_rows=[1.0, 0.0]))
    assert "minus infinity" in overflow.text
    assert "q and k are finite" in overflow.text
    (blind,) = run(call(nan_rows=1.0, query_nonfinite=math.nan))
    assert "was not measured" in blind.text


def test_the_first_tensor_that_is_not_finite_in_the_order_of_running() -> None:
    def judged(
        *calls: CallSample, loss: float | None = None, scaled: bool = False
    ) -> list[tuple[str, str | None, str]]:
        told = nonfinite_alarm((), StepSample(3, calls, loss=loss, scaled=scaled))
        return [(alarm.severity, alarm.site, alarm.text) for alarm in told]

    gradients = {"query_grad_nonfinite": [0.0, 2.0], "key_grad_nonfinite": [0.0, 1.0]}
    sick, logits = call("b", **gradients), call("c", nan_rows=1.0, **gradients)
    ((severity, site, text),) = judged(call("a", **gradients), logits, sick, loss=math.nan)
    assert (severity, site) == ("critical", "c")
    ((severity, site, text),) = judged(call("a", **gradients), sick, call("c"), loss=math.nan)
    assert (severity, site) == ("critical", None)
    assert "the loss is nan at step 3; q, k and logits of every attention" in text
    ((severity, site, text),) = judged(call("a", **gradients), sick, call("c"), loss=2.0)
    assert (severity, site) == ("critical", "b")
    assert "b: 2 rows of dL/dq and 1 keys of dL/dk of one head hold NaN or infinity at step 3, first in head 1" in text
    assert "the forward pass and the loss are finite" in text
    shared = call("b", key_grad_nonfinite=[16.0, 16.0])  # heads of q that share a head of k
    assert "b: 16 keys of dL/dk of one head hold" in judged(shared)[0][2]
    assert [one[0] for one in judged(sick, loss=2.0, scaled=True)] == ["note"]
    assert [one[0] for one in judged(replace(sick, dtype="float16"))] == ["note"]
    ((severity, site, text),) = judged(call("a"), call("b", query_nonfinite=3.0))
    assert (severity, site) == ("critical", "b")
    assert "3 numbers of q" in text
    assert judged(call("a", query_nonfinite=3.0, blind_rows=1.0)) == []  # of a row that sees no key
    assert judged(call("a", query_grad_nonfinite=math.nan, key_grad_nonfinite=math.nan), loss=2.0) == []


def test_the_scale_is_another_than_at_first() -> None:
    first, rounded, moved = call(), call(scale_ratio=1.009), call(scale_ratio=1.011)
    alarms = run(first, rounded, moved, moved)
    assert brief(alarms) == [("ledger", "warn", 20)]
    assert alarms[0].value == 1.011
    assert run(first, call(formula="softmax(0.25 * q.k + causal + padding)"), call(scale_ratio=None)) == []
    assert run(replace(first, fixed_scale=False), replace(moved, fixed_scale=False)) == []
    assert brief(run(first, call(factors=("op: sdpa scale",)))) == [("ledger", "note", 10)]


@pytest.mark.parametrize(
    ("start", "later", "kind"),
    [
        ({"entropy_fraction": 0.98}, {"entropy_fraction": 0.9995, "std_logit": 0.05}, "flat"),
        ({"peak": 0.89}, {"peak": 0.991}, "one-hot"),
    ],
)
def test_a_head_that_collapsed(start: dict[str, float], later: dict[str, float], kind: str) -> None:
    four = {name: [value] * 3 for name, value in start.items()}
    sick = {name: [value, *[four.get(name, [HEALTHY[name]])[0]] * 2] for name, value in later.items()}
    before, after = call(heads=3, **four), call(heads=3, **sick)
    alarms = run(before, before, after, after)
    assert [(a.name, a.severity, a.step, a.head) for a in alarms] == [("collapsed", "note", 20, 0)]
    assert kind in alarms[0].text
    assert run(after, after) == []  # it was so from the start
    if kind == "flat":  # as high an entropy with logits that deviate
        assert run(before, call(heads=3, entropy_fraction=0.9995, std_logit=0.11)) == []
    most = call(heads=3, **later)
    assert [one for one in brief(run(before, most)) if one[0] == "collapsed"] == [("collapsed", "warn", 10)]
    assert "collapsed" not in {one[0] for one in brief(run(before, most, after))[1:]}, "one of the heads that it named"


def test_what_is_no_longer_seen() -> None:
    both, one = [call("a"), call("b")], [call("a")]
    assert run(both, one, both, one, both) == []  # a layer that is dropped at random
    (gone,) = run(both, one, one, one)
    assert (gone.name, gone.severity, gone.site, gone.step) == ("lost", "warn", "b", 20)
    assert brief(run(both, [], [])) == [("lost", "warn", 10)]
    unread = replace(call(), columns={}, reason="its rows were not measured")
    assert brief(run(unread, unread)) == [("unmeasured", "note", 1)]
    assert brief(run(call(), unread)) == [("lost", "warn", 10), ("unmeasured", "note", 10)]


def test_what_was_not_measured_is_noted_once_a_place_and_reason() -> None:
    def sample(step: int, *texts: str, how: str = "as is") -> StepSample:
        return StepSample(step, (call(),), how, texts)

    unread = replace(call("b"), columns={}, reason="no data")
    steps = [
        sample(1, "0: no gradients of query", "1: no gradients of query"),
        sample(2, "0: no gradients of query", "12 passes were left out"),
        sample(3, "rank 3: 0: no gradients of query", "7 passes were left out"),
        StepSample(4, (call(), unread, replace(unread, index=1)), "as is"),
        StepSample(5, (call(), unread, replace(unread, index=1, reason="no q")), "as is"),
        sample(6, "no q", how=not_measured("no q")),
        sample(7, how=not_measured("no k")),
    ]
    told: list[Alarm] = []
    for one in steps:
        told += fresh(unmeasured_alarms((), one), told)
    assert {alarm.severity for alarm in told} == {"note"}
    assert [(alarm.step, alarm.site, alarm.index, alarm.text) for alarm in told] == [
        (1, None, None, "0: no gradients of query"),
        (1, None, None, "1: no gradients of query"),
        (2, None, None, "12 passes were left out"),
        (3, None, None, "rank 3: 0: no gradients of query"),
        (4, "b", 0, "b: no data"),
        (4, "b", 1, "b (call 2): no data"),
        (5, "b", 1, "b (call 2): no q"),
        (6, None, None, "no q"),
        (7, None, None, "no k"),
    ]
    assert [one.unmeasured for one in steps] == [2, 2, 2, 2, 2, 1, 1]
    assert [len(one.measured) for one in steps] == [1] * 7


def test_step_that_is_never_called() -> None:
    assert [alarm.name for alarm in idle(0, 2, 1)] == ["idle"]
    assert list(idle(0, 0, 1)) == list(idle(3, 2, 4)) == []

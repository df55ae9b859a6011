"""Time ratios and peak memory of the claims about cost."""

import pytest
import torch

from sqrtdk_lab._costs import WARM_UP, one_thread, peak_bytes, time_ratio, typical

KIB = 1024


def test_peak_counts_what_is_alive_at_once_and_no_input() -> None:
    x = torch.ones(256)
    assert peak_bytes(lambda: None) == 0
    assert peak_bytes(lambda: x.view(16, 16).mT) == 0
    assert peak_bytes(lambda: x.mul_(1.0)) == 0
    assert peak_bytes(lambda: [x + 1.0, x + 2.0, x + 3.0]) == 3 * KIB
    assert peak_bytes(lambda: [float((x + i).sum()) for i in range(3)]) == KIB + 4


def test_peak_counts_a_tensor_once_whatever_its_views() -> None:
    x = torch.ones(256)

    def call() -> torch.Tensor:
        made = x + 1.0
        return made.view(16, 16)[2:].mT.mul_(2.0)

    assert peak_bytes(call) == KIB


def test_peak_falls_when_a_tensor_is_freed_and_another_takes_its_place() -> None:
    x = torch.ones(256)

    def call() -> None:
        for _ in range(50):
            made = x + 1.0
            del made

    assert peak_bytes(call) == KIB


def test_time_ratio_tells_more_work_from_less() -> None:
    x = torch.ones(200_000)

    def times(number: int) -> None:
        for _ in range(number):
            x.exp()

    ratio = time_ratio("ratio", lambda: times(8), lambda: times(1), blocks=12, calls=3, place="here")
    assert 3.0 < ratio.low <= ratio.value <= ratio.high
    assert (ratio.samples, ratio.method, ratio.at) == (12, "t", {"place": "here"})


def test_calls_take_turns_at_going_first() -> None:
    order: list[str] = []
    time_ratio("ratio", lambda: order.append("a"), lambda: order.append("b"), blocks=2, calls=2)
    assert "".join(order) == "baab" * ((WARM_UP + 4) // 2)


def test_timings_count_by_the_medians_of_blocks_after_the_first_ones() -> None:
    made = iter([99.0] * WARM_UP + [1.0, 50.0, 2.0] + [4.0, 4.0, 70.0])
    figure = typical("time", lambda: next(made), blocks=2, calls=3)
    assert (figure.value, figure.samples) == (3.0, 2)
    assert next(made, None) is None


def test_threads_are_given_back_even_after_an_error() -> None:
    seen = []

    def fail() -> None:
        with one_thread():
            seen.append(torch.get_num_threads())
            raise ZeroDivisionError

    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError):
        fail()
    assert (seen, torch.get_num_threads()) == ([1], before)

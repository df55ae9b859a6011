"""Features of the trace that were built apart, in one model, and the verdicts that come of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sqrtdk import check
from sqrtdk.audit.records import CheckReport

B, L, D, H, E = 2, 12, 32, 4, 8
ROOT = E**-0.5


class Net(nn.Module):
    def __init__(self, attend: object) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))
        self.gain = nn.Parameter(torch.full((E,), 2.0))
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (H, E)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.attend(self, q, k, v)  # type: ignore[operator,no-any-return]


def audit(attend: object, *, static: bool = False) -> CheckReport:
    torch.manual_seed(0)
    return check(Net(attend), torch.randn(B, L, D), static=static)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(("scale", "mistake"), [(ROOT, None), (1.0, "missing"), (ROOT**2, "twice")])
def test_a_scale_that_the_code_fills_into_a_tensor_is_judged(scale: float, mistake: str | None, static: bool) -> None:
    def attend(m: Net, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT / torch.full((1,), 1 / scale, device=q.device)).softmax(-1) @ v

    (judged,) = audit(attend, static=static).calls
    assert (judged.verdict, judged.mistake) == ("unexplained" if mistake else "exact", mistake)


def test_a_learned_gain_that_is_the_same_for_all_channels_is_no_mistake() -> None:
    (judged,) = audit(lambda m, q, k, v: ((q * m.gain) @ k.mT * ROOT).softmax(-1) @ v).calls
    assert judged.verdict == "declared"


@pytest.mark.parametrize("static", [False, True])
def test_features_in_two_parts_do_not_fail(static: bool) -> None:
    """The scale 1/sqrt(8) is that of both parts together, 4 features each."""

    def attend(m: Net, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q[..., :4] @ k[..., :4].mT + q[..., 4:] @ k[..., 4:].mT) * ROOT).softmax(-1) @ v

    report = audit(attend, static=static)
    assert [judged.verdict for judged in report.calls] == ["unmeasured"]
    assert report.exit_code == 0


@pytest.mark.parametrize("static", [False, True])
def test_unlike_blocks_name_the_lines_of_their_factors(static: bool) -> None:
    def attend(m: Net, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first = q @ k[..., :6, :].mT * ROOT
        rest = q @ k[..., 6:, :].mT * 0.1
        return torch.cat([first, rest], -1).softmax(-1) @ v

    report = audit(attend, static=static)
    first = attend.__code__.co_firstlineno + 1
    lines = next(finding.at for finding in report.findings if finding.rule == "blocks")
    assert [at.rpartition(":")[2] for at in (lines or "").split(", ")] == [str(first), str(first + 1)]

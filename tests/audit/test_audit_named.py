"""The audit beside attention that is no softmax of one product: not judged, not accused, and said."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sqrtdk.audit.check import check

E, H, L = 8, 4, 6
ROOT = E**-0.5


class Net(nn.Module):
    """An attention by `attend`, and a plain one after it."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.attend = nn.Linear(H * E, 3 * H * E), nn.Linear(H * E, 3 * H * E), attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.first(x).unflatten(-1, (3, H, E)).permute(2, 0, 3, 1, 4)
        x = x + self.attend(q, k, v).transpose(1, 2).flatten(2)
        q, k, v = self.second(x).unflatten(-1, (3, H, E)).permute(2, 0, 3, 1, 4)
        return ((q @ k.mT * ROOT).softmax(-1) @ v).transpose(1, 2).flatten(2)


def sinkhorn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    w = (q @ k.mT).softmax(-1)
    for _ in range(3):
        w = w / w.sum(-2, keepdim=True)
        w = w / w.sum(-1, keepdim=True)
    return w @ v


@pytest.mark.parametrize(
    ("attend", "word"),
    [
        (lambda q, k, v: (q @ k.mT).sigmoid() @ v, "seen up to there: sigmoid(q.k)"),
        (lambda q, k, v: q @ (k.mT @ v), "linear attention"),
        (sinkhorn, "Sinkhorn"),
    ],
    ids=["sigmoid", "linear", "Sinkhorn"],
)
def test_what_has_no_softmax_to_judge_is_unmeasured_by_name(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], word: str
) -> None:
    report = check(Net(attend), torch.randn(2, L, H * E), fail_on="unmeasured")
    assert [judged.verdict for judged in report.calls if judged.mistake is None][-1] == "exact"
    assert all(judged.mistake is None for judged in report.calls)
    (finding,) = [finding for finding in report.findings if finding.rule == "unmeasured"]
    assert word in finding.message
    assert report.exit_code == 1

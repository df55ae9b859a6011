"""Advice on a scale says the code that stands on its line, and that code as it should be."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from sqrtdk import check, diff
from sqrtdk.audit.written import written_root
from sqrtdk.compare.fixes import fix_of
from sqrtdk.tracing.tape.places import first_line

DIM, HEADS = 64, 4


class Learner(nn.Module):
    """An attention as one writes it to learn, with names of its own."""

    def __init__(self, form: str = "", width: int = DIM) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form, self.dim = form, width
        self.qkv = nn.Linear(DIM, 3 * DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        if self.form == "fused":
            return scaled_dot_product_attention(q, k, v, scale=self.dim**-0.5)
        if self.form == "times":
            z = q @ k.mT * (1 / math.sqrt(self.dim))
        elif self.form == "elsewhere":
            root = math.sqrt(self.dim)
            z = q @ k.mT / root
        else:
            z = q @ k.mT / math.sqrt(self.dim)
        return z.softmax(-1) @ v


WRITTEN = {
    "": "write `/ math.sqrt(16)` for `/ math.sqrt(self.dim)`",
    "fused": "write `scale=16**-0.5` for `scale=self.dim**-0.5`",
    "times": "write `/ math.sqrt(16)` for `/ math.sqrt(self.dim)`",
}
X = torch.randn(1, 6, DIM, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("form", WRITTEN)
def test_advice_says_the_code_that_is_there(form: str) -> None:
    (finding,) = (one for one in check(Learner(form), (X,), laws="none").findings if one.rule == "scale_ledger")
    assert finding.fix.startswith(f"{WRITTEN[form]}: 16 is the width of a head")
    # 16 is no width that is padded to 64
    assert "padded_head" not in finding.message
    (pair,) = diff(Learner(form, DIM // HEADS), Learner(form), (X,)).pairs
    assert [fix_of(cause) for cause in pair.causes] == [WRITTEN[form]]


def test_advice_without_a_root_on_the_line_has_the_numbers() -> None:
    (finding,) = (one for one in check(Learner("elsewhere"), (X,), laws="none").findings if one.rule == "scale_ledger")
    assert finding.fix.startswith("take the root of the width of a head: divide the logits by sqrt(16)")
    (pair,) = diff(Learner("elsewhere", DIM // HEADS), Learner("elsewhere"), (X,)).pairs
    (cause,) = pair.causes
    assert "self.scaling" not in (fix := str(fix_of(cause)))
    assert "make 0.25 the only factor" in fix


def test_a_file_is_read_as_it_is_now(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    for root in ("math.sqrt(dim)", "math.sqrt(width)"):
        file.write_text(f"def f(q, k, dim, width):\n    return q @ k / {root}\n")
        code = compile(file.read_text(), str(file), "exec").co_consts[0]
        assert written_root(first_line(code)[:-1] + "2", 16) == (f"/ {root}", "/ math.sqrt(16)")


def test_a_line_that_is_not_there_has_no_root(tmp_path: Path) -> None:
    assert written_root(None, 16) is None
    assert written_root("nowhere.py:3", 16) is None
    assert written_root(first_line(Learner.forward.__code__), 16) is None

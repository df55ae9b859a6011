"""A program: judges the compiled kernel of the package on the path until something is found wrong.

By the battery, with dropout, and with biases that learn. Prints what it found and exits with 1; with 0 where nothing is
wrong.
"""

from __future__ import annotations

import sys
from functools import partial

import torch

from tests.attention.cases import CASES, LONG_CASES, Case
from tests.attention.hidden_rows import fixed_rows, wrong
from tests.attention.judging import expect, judge
from tests.attention.test_attention_kernel_skips import MASKS, judge_mask
from tests.attention.training import BIASES, LAID, SHAPES, judge_bias, judge_dropout

SOON = 80  # small cases, in which most errors are found, before the long ones


def judged(case: Case) -> list[str]:
    """What is wrong with a case of the battery."""
    return judge(case, "cpu", expect(case))


def main() -> int:
    """Judge all cases; the exit code."""
    torch.set_num_threads(2)
    torch.manual_seed(0)
    small = [(case.id, partial(judged, case)) for case in CASES if case.cpu_at_once]
    training = [(f"dropout, {name}", partial(judge_dropout, name, torch.float32)) for name in SHAPES]
    training += [(f"a bias of {sizes}", partial(judge_bias, sizes)) for sizes in BIASES]
    training += [(f"a bias, {laid}", partial(judge_bias, (2, 1, 150, 601), laid)) for laid in LAID]
    training += [(f"a mask, {name}", partial(judge_mask, name, "", torch.float32)) for name in MASKS]
    training += [("rows hidden whole", partial(wrong, fixed_rows(), "cpu", torch.float32))]
    long = [(case.id, partial(judged, case)) for case in LONG_CASES]
    for name, judging in [*small[:SOON], *training, *long, *small[SOON:]]:
        try:
            found = judging()
        except Exception as error:
            found = [f"{type(error).__name__}: {error}"]
        if found:
            print(f"{name}: {found[0]}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

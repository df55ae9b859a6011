"""A program: the compiled kernel, built with the address and undefined-behaviour sanitizers, runs the battery.

Run by `test_attention_kernel_sanitized.py`, with the sanitizer's library preloaded. Prints how many cases ran.
"""

from __future__ import annotations

from itertools import product

import torch

import sqrtdk
from sqrtdk.impl.kernel import build, libraries, load
from tests.attention.cases import CASES, LONG_CASES, as_leaves
from tests.attention.test_attention_kernel_skips import MASKS, judge_mask
from tests.attention.training import BIASES, LAID, SHAPES, judge_bias, judge_dropout

FLAGS = ("-g", "-O1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")


def main() -> None:
    """Build, load, run."""
    libraries.COMPILE = (*libraries.COMPILE, *FLAGS)
    libraries._digest.cache_clear()
    build.ready()
    torch.set_num_threads(2)
    ran = 0
    for case in [*LONG_CASES, *(case for case in CASES if case.cpu_at_once)]:
        leaves = as_leaves(case.leaves(), case.torch_dtype)
        output, aux = sqrtdk.attention(**case.given(leaves), impl="cpu", return_aux=sqrtdk.AuxRequest.all())
        total = output.float().nan_to_num().sum() + aux.entropy_nats.nan_to_num().sum()
        torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        with torch.no_grad():
            sqrtdk.attention(**case.given(leaves), impl="cpu")
        ran += 1
    for name, dtype in product(SHAPES, (torch.float32, torch.bfloat16)):
        judge_dropout(name, dtype)
    for sizes in BIASES:
        judge_bias(sizes)
    for name, dtype in product(MASKS, (torch.float32, torch.bfloat16)):
        judge_mask(name, "bias", dtype)
    for laid, rows in product(LAID, (150, 3)):
        judge_bias((2, 1, rows, 601), laid, rows)
    print(ran, load.kernel_state().path)


if __name__ == "__main__":
    main()

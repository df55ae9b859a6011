"""The ways that benchmarks/gpu.py times: ours, torch's fused kernels, FlexAttention, and what gives statistics today.

Every way makes a call from a case (`workloads.Case`) whose tensors lie on the device.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import sqrtdk
from peers import Call, dense_statistics, sdpa
from sqrtdk import AuxRequest
from sqrtdk.errors import UnsupportedError
from ways import BASE, Way
from workloads import Case

LARGEST_CHUNK = 2**28  # weights that the dense code holds at once: it takes head after head
FLEX_LENGTHS = (1, 4, 4096)  # what compiles for seconds at each length: not at all of them within ten minutes
Kernel = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]


def ours(case: Case, statistics: bool) -> Call:
    options = {"is_causal": case.workload.is_causal, "enable_gqa": case.workload.grouped, "impl": "triton"}
    if not statistics:
        return lambda: sqrtdk.attention(*case.inputs, **options)
    return lambda: sqrtdk.attention(*case.inputs, return_aux=AuxRequest.all(), **options)[0]


def forced(case: Case, backend: SDPBackend) -> Call:
    """Torch's operation on one of its kernels, or an error."""
    call = sdpa(case)

    def on_backend() -> Tensor:
        with sdpa_kernel(backend):
            return call()

    with warnings.catch_warnings():  # of why it can't
        warnings.simplefilter("ignore")
        on_backend()
    return on_backend


def flex(case: Case, max_scores: bool, lengths: tuple[int, ...] = FLEX_LENGTHS) -> Call:
    """Torch's FlexAttention, compiled for this shape alone."""
    from torch.nn.attention import flex_attention as module

    workload = case.workload
    if lengths and workload.length not in lengths:
        raise UnsupportedError(f"it is compiled for {', '.join(map(str, lengths))} rows only, to save time; --flex all")
    mask = None
    if workload.is_causal:
        sizes = workload.length, workload.keys
        mask = module.create_block_mask(lambda b, h, i, j: i >= j, None, None, *sizes, device=case.query.device)
    options = {"block_mask": mask, "enable_gqa": workload.grouped}
    if max_scores:
        options["return_aux"] = module.AuxRequest(max_scores=True)
    compiled = torch.compile(module.flex_attention, fullgraph=True, dynamic=False)

    def call() -> Tensor:
        found = compiled(*case.inputs, **options)
        return found[0] if max_scores else found

    return call


def cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    run = torch.ops.aten._scaled_dot_product_cudnn_attention
    return run(q, k, v, None, True, 0.0, causal, False, scale=scale)[:2]


def flash(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    if q.device.type == "cpu":
        run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return run(q, k, v, 0.0, causal, scale=scale)
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[:2]


def three_runs(case: Case, kernel: Callable[..., tuple[Tensor, Tensor]]) -> Call:
    """A fused kernel that returns lse, run for output and lse, for the entropy (values: the keys) and for sum p^2.

    The few operations on rows that make the statistics of what it returns are left out, in its favour.
    """
    if case.workload.grouped:
        raise UnsupportedError("the kernel alone takes no shared heads")
    (q, k, v), scale, causal = case.inputs, case.workload.width**-0.5, case.workload.is_causal

    def call() -> Tensor:
        output, _ = kernel(q, k, v, scale, causal)
        kernel(q, k, k, scale, causal)
        kernel(q, k, v, 2.0 * scale, causal)
        return output

    return call


def dense(case: Case) -> Call:
    """The formula and all statistics in torch, as many heads at a time as 2^28 weights are."""
    workload = case.workload
    q, k, v = (tensor.flatten(0, 1) for tensor in case.inputs)
    group, pairs = workload.heads // workload.key_heads, workload.length * workload.keys
    at_once = max(1, LARGEST_CHUNK // pairs)
    hidden = None
    if workload.is_causal:
        hidden = torch.ones(workload.length, workload.keys, dtype=torch.bool, device=q.device).triu(1)

    def call() -> Tensor:
        outputs = []
        for start in range(0, len(q), at_once):
            heads = torch.arange(start, min(start + at_once, len(q)), device=q.device) // group
            logits = q[start : start + at_once] @ k[heads].mT * workload.width**-0.5
            if hidden is not None:
                logits = logits.masked_fill(hidden, -math.inf)
            outputs.append(dense_statistics(logits, v[heads], hidden)[0])
        return torch.cat(outputs).view(workload.batch, workload.heads, workload.length, -1)

    return call


# All are peers: an error of one is its reason, and what else can be measured is.
FORWARD: dict[str, Way] = {
    BASE: Way("torch's scaled_dot_product_attention, whatever it chooses", sdpa),
    "ours": Way("this kernel", partial(ours, statistics=False), peer=True),
    "ours-stats": Way("this kernel, all statistics", partial(ours, statistics=True), statistics=True, peer=True),
    "cudnn": Way("torch's cuDNN kernel", partial(forced, backend=SDPBackend.CUDNN_ATTENTION), peer=True),
    "flash": Way("torch's FlashAttention", partial(forced, backend=SDPBackend.FLASH_ATTENTION), peer=True),
    "flex": Way("torch's FlexAttention, compiled", partial(flex, max_scores=False), peer=True),
    "flex-max": Way("the same with max_scores", partial(flex, max_scores=True), peer=True),
    "cudnn-thrice": Way("cuDNN, three runs for lse, entropy and sum p^2", partial(three_runs, kernel=cudnn), peer=True),
    "flash-thrice": Way("flash, three runs for the same", partial(three_runs, kernel=flash), peer=True),
    "dense": Way("the formula and all statistics in torch", dense, statistics=True, peer=True),
}
TRAINING = {name: FORWARD[name] for name in (BASE, "ours", "ours-stats", "cudnn", "flash", "flex")}
MEASURE = "measure"  # has no output that could be compared


def measured(case: Case) -> Callable[[], object]:
    """Statistics alone."""
    query, key, _ = case.inputs
    options = {"is_causal": case.workload.is_causal, "enable_gqa": case.workload.grouped}
    return lambda: sqrtdk.measure(query, key, **options)

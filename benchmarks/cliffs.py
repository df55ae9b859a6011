"""Every kind of attention that people write, at every length: its time over torch's, and how both grow.

A cell is a kind of call, a length, a dtype and a pass. Its ratio is the time of `sqrtdk.attention` over that of torch's
SDPA for the same call, whose whole bias or mask is made before; where SDPA can't, over compiled FlexAttention, which
has no backward pass on CPUs, or over the formula in plain torch. The growth of a cell is what a pair of a visible key
and a row takes, over what it takes at the length before: a step in it is a cliff. Times are CPU times, so that other
work on the machine moves them less; with one thread they are what a quiet machine takes.

    python benchmarks/attention.py --only cliffs [--json FILE]
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import sqrtdk
from sqrtdk import positions, scales
from timing import Spread, ratio, rounds

if TYPE_CHECKING:
    from jaxtyping import Float, Int

HEADS = {256: 8, 1024: 8, 4096: 8, 16384: 1}  # by length; one at the last, where a whole bias of 8 has 8 GiB
DIM, WINDOW, DOCUMENTS, SOFTCAP, GAIN = 64, 256, 8, 30.0, 10.0
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PASSES = ("forward", "statistics", "both passes")
SECONDS = 2.0  # for the rounds of a cell, of which there are one to `MOST`
MOST, SHORTEST = 15, 0.02

Work = Callable[..., Any]
sdpa = functional.scaled_dot_product_attention


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of call at one length.

    Attributes:
        ours: options of `sqrtdk.attention`.
        theirs: torch's call of q, k, v for the forward pass.
        both: the same where gradients are taken; None: `theirs`.
        pairs: visible pairs of a row and a key, of one head.
        learned: tensors, beside q, k and v, whose gradients both take.
        reference, reference_of_both: what `theirs` and `both` are.
    """

    ours: dict[str, Any]
    theirs: Work
    pairs: float
    both: Work | None = None
    learned: tuple[Tensor, ...] = ()
    reference: str = "sdpa"
    reference_of_both: str = "sdpa"


@dataclass(frozen=True, slots=True)
class Size:
    """What a case is made for."""

    length: int
    heads: int
    dtype: torch.dtype
    square: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "square", float(self.length) ** 2)

    def triangle(self) -> Tensor:
        """Which keys a causal row sees, (L, L)."""
        return torch.ones(self.length, self.length, dtype=torch.bool).tril()

    def distances(self) -> Tensor:
        """Return i - j, (L, L)."""
        at = torch.arange(self.length)
        return at[:, None] - at

    def slopes(self) -> Tensor:
        return torch.tensor(positions.alibi_slopes(self.heads))


class Relative(nn.Module):
    """A user's term: one learned number a head and distance."""

    content = False

    def __init__(self, table: Float[Tensor, "H distances"]) -> None:
        super().__init__()
        self.table = table

    def term(self, query: Tensor, key: Tensor, rows: Tensor, columns: Tensor) -> Float[Tensor, "H R S"]:
        return self.of_distance(rows[:, None] - columns, query)

    def of_distance(self, distance: Int[Tensor, "*distances"], query: Tensor) -> Float[Tensor, "#H *distances"]:
        return self.table[:, distance + self.table.shape[1] // 2].float()


def plain(size: Size) -> Case:
    return Case({}, sdpa, size.square)


def causal(size: Size) -> Case:
    return Case({"is_causal": True}, lambda q, k, v: sdpa(q, k, v, is_causal=True), size.square / 2)


def window(size: Size) -> Case:
    mask = size.triangle() & (size.distances() < WINDOW)
    theirs = masked(mask)
    return Case({"is_causal": True, "window": WINDOW}, theirs, float(mask.sum()))


def documents(size: Size) -> Case:
    of = torch.arange(size.length) * DOCUMENTS // size.length
    mask = size.triangle() & (of[:, None] == of)
    return Case({"attn_mask": mask}, masked(mask), float(mask.sum()))


def padding(size: Size) -> Case:
    mask = (torch.arange(size.length) < size.length * 7 // 8).view(1, 1, 1, -1)
    return Case({"attn_mask": mask}, masked(mask), size.square * 7 / 8)


def float_mask(size: Size) -> Case:
    lowest = torch.finfo(size.dtype).min
    mask = torch.zeros(size.length, size.length, dtype=size.dtype).masked_fill(~size.triangle(), lowest)
    return Case({"attn_mask": mask[None, None]}, masked(mask[None, None]), size.square)


def alibi(size: Size) -> Case:
    bias = -size.slopes().view(-1, 1, 1) * size.distances()
    bias = bias.masked_fill(~size.triangle(), -math.inf).to(size.dtype)
    return Case({"bias": "alibi", "is_causal": True}, masked(bias), size.square / 2)


def t5(size: Size) -> Case:
    term = positions.t5_bias(size.heads)
    bucket = positions.t5_bucket(-size.distances())
    table = term.embedding.weight

    def bias() -> Tensor:
        return functional.embedding(bucket, table).movedim(-1, 0)

    return learned_bias(size, {"bias": term, "scale": 1.0}, bias, table)


def relative(size: Size) -> Case:
    table = torch.randn(size.heads, 2 * size.length - 1).requires_grad_()
    at = size.distances() + size.length - 1
    return learned_bias(size, {"bias": Relative(table)}, lambda: table[:, at], table)


def learned_bias(size: Size, ours: dict[str, Any], bias: Callable[[], Tensor], table: Tensor) -> Case:
    with torch.no_grad():
        whole = bias().to(size.dtype)
    scale = ours.get("scale")
    return Case(
        ours,
        lambda q, k, v: sdpa(q, k, v, attn_mask=whole, scale=scale),
        size.square,
        both=lambda q, k, v: sdpa(q, k, v, attn_mask=bias().to(q.dtype), scale=scale),
        learned=(table,),
    )


def softcap(size: Size) -> Case:
    def capped(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return SOFTCAP * torch.tanh(score / SOFTCAP)

    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (SOFTCAP * torch.tanh(q @ k.mT * DIM**-0.5 / SOFTCAP)).softmax(-1) @ v

    return flexible(size, {"softcap": SOFTCAP}, formula, capped, size.square)


def sinks(size: Size) -> Case:
    column = torch.randn(size.heads).requires_grad_()

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """With one more key, whose logit is the sink and whose value is 0."""
        k, v = (functional.pad(t, (0, 0, 0, 1)) for t in (k, v))
        logit = column.to(q.dtype).view(-1, 1, 1)
        return sdpa(q, k, v, attn_mask=torch.cat([torch.zeros(size.heads, 1, size.length, dtype=q.dtype), logit], -1))

    return Case({"sinks": column}, theirs, size.square, learned=(column,))


def cosine(size: Size) -> Case:
    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(functional.normalize(q, dim=-1), functional.normalize(k, dim=-1), v, scale=GAIN)

    return Case({"score": "cosine", "scale": GAIN}, theirs, size.square)


def distance(size: Size) -> Case:
    scale = 0.5 / DIM

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """In float32, as here; |q|^2 cancels in the softmax."""
        q, k, v = q.float(), k.float(), v.float()
        return sdpa(q, k, v, attn_mask=-scale * k.square().sum(-1).unsqueeze(-2), scale=2 * scale).to(size.dtype)

    named = {"reference": "sdpa in float32", "reference_of_both": "sdpa in float32"}
    return Case({"score": "distance", "scale": scale}, theirs, size.square, **named)


def learned_scale(size: Size) -> Case:
    scale = (torch.rand(size.heads) / DIM**0.5).requires_grad_()

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q * scale.to(q.dtype).view(-1, 1, 1), k, v, scale=1.0)

    return Case({"scale": scale}, theirs, size.square, learned=(scale,))


def log_n(size: Size) -> Case:
    factor = torch.arange(1, size.length + 1).clamp(min=2).log().view(-1, 1)

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q * factor.to(q.dtype), k, v, is_causal=True, scale=DIM**-0.5)

    return Case({"scale": scales.log_n(), "is_causal": True}, theirs, size.square / 2)


def score_mod(size: Size) -> Case:
    slopes = size.slopes()

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return SOFTCAP * torch.tanh(score / SOFTCAP) - slopes[h] * (q_idx - kv_idx)

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx >= kv_idx

    bias = -slopes.view(-1, 1, 1) * size.distances()
    bias = bias.masked_fill(~size.triangle(), -math.inf)

    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        z = SOFTCAP * torch.tanh(q @ k.mT * DIM**-0.5 / SOFTCAP) + bias.to(q.dtype)
        return z.softmax(-1) @ v

    return flexible(size, {"score_mod": mod, "mask_mod": mask}, formula, mod, size.square / 2, mask)


def score_function(size: Size) -> Case:
    def l1(q: Tensor, k: Tensor) -> Tensor:
        return -torch.cdist(q, k, p=1.0)

    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (0.1 * l1(q.float(), k.float())).softmax(-1).to(v.dtype) @ v

    named = {"reference": "formula", "reference_of_both": "formula"}
    return Case({"score": l1, "scale": 0.1}, formula, size.square, **named)


def masked(mask: Tensor) -> Work:
    return lambda q, k, v: sdpa(q, k, v, attn_mask=mask)


def flexible(
    size: Size, ours: dict[str, Any], formula: Work, mod: Work, pairs: float, mask: Work | None = None
) -> Case:
    """A case that FlexAttention can do, but for its gradients."""
    compiled = torch.compile(flex_attention)
    blocks = mask and create_block_mask(mask, None, None, size.length, size.length, device="cpu")

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return compiled(q, k, v, score_mod=mod, block_mask=blocks)

    named = {"reference": "compiled FlexAttention", "reference_of_both": "formula"}
    return Case(ours, theirs, pairs, both=formula, **named)


KINDS: dict[str, Callable[[Size], Case]] = {
    "plain": plain,
    "causal": causal,
    "window": window,
    "documents": documents,
    "padding mask": padding,
    "float mask": float_mask,
    "ALiBi": alibi,
    "T5 bias": t5,
    "relative table": relative,
    "softcap": softcap,
    "sinks": sinks,
    "cosine": cosine,
    "distance": distance,
    "learned scale": learned_scale,
    "log n scale": log_n,
    "score_mod": score_mod,
    "score function": score_function,
}


def cells(kinds: list[str], lengths: list[int], dtypes: list[str]) -> Iterator[dict[str, Any]]:
    """Every cell that is asked for, as it goes into the record, one after the other."""
    for kind in kinds:
        for dtype in (dtype for dtype in DTYPES if name_of(dtype) in dtypes):
            per_pair: dict[str, float] = {}
            for length in lengths:
                torch._dynamo.reset()
                yield from of_length(kind, Size(length, HEADS[length], dtype), per_pair)


def of_length(kind: str, size: Size, per_pair: dict[str, float]) -> Iterator[dict[str, Any]]:
    """The three cells of a kind, a length and a dtype; `per_pair` has the times of the length before."""
    torch.manual_seed(0)
    case = KINDS[kind](size)
    q, k, v = (torch.randn(1, size.heads, size.length, DIM, dtype=size.dtype) for _ in range(3))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    given = [t.detach() for t in leaves]  # FlexAttention takes nothing that learns on a CPU
    gradient = torch.randn_like(q)

    def gradients(call: Work, **options: Any) -> object:
        with torch.enable_grad():
            return torch.autograd.grad(call(q, k, v, **options), (*leaves, *case.learned), gradient)

    def here(*given: Tensor, **options: Any) -> Any:
        return sqrtdk.attention(*given, **case.ours, **options)

    with torch.no_grad():
        here_ways: dict[str, Callable[[], object]] = {
            "forward": lambda: here(*given),
            "statistics": lambda: here(*given, return_aux=True),
            "both passes": lambda: gradients(here),
        }
        both = {"both passes": here_ways["both passes"], "reference": lambda: gradients(case.both or case.theirs)}
        once = {name: work for name, work in here_ways.items() if name not in both}
        times = timed(once | {"reference": lambda: case.theirs(*given)})
        times_of_both = timed(both)
        choices = {name: sqrtdk.explain(*given, **case.ours, return_aux=name == "statistics") for name in PASSES}
        peaks = {name: added_mib(work) for name, work in here_ways.items()}
    for name in PASSES:
        found = times_of_both if name in both else times
        ours = Spread.of(found[name])
        work = ours.median / (case.pairs * size.heads)
        growth = work / per_pair[name] if name in per_pair else None
        per_pair[name] = work
        yield {
            "kind": kind,
            "length": size.length,
            "heads": size.heads,
            "dtype": name_of(size.dtype),
            "pass": name,
            "ratio": asdict(ratio(found[name], found["reference"])),
            "ms": 1e3 * ours.median,
            "growth": growth,
            "added_mib": peaks[name],
            "reference": case.reference_of_both if name in both else case.reference,
            "impl": choices[name].impl,
            "reason": choices[name].reason,
            "rounds": len(found[name]),
        }


def timed(ways: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """`rounds` as many as fit the time, each way called so often that the clock can tell, in CPU seconds."""
    seconds = []
    for work in ways.values():
        work()
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    calls = max(1, math.ceil(SHORTEST / max(min(seconds), 1e-6)))
    return rounds(ways, min(MOST, max(1, int(SECONDS / (calls * sum(seconds))))), calls, time.process_time)


def added_mib(work: Callable[[], object]) -> float:
    """What a call adds to the memory of the process at its largest, output and gradients included, by Linux's count."""
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before is given back, so that it is counted again
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = memory("VmRSS")
    found = work()
    added = memory("VmHWM") - before
    del found
    return added


def memory(name: str) -> float:
    """A line of Linux's status of this process, in MiB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

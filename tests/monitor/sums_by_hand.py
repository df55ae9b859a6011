"""Attentions whose rows are summed up, and the columns of the records made of dense float64 logits."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sqrtdk.monitor.sums import HeadSums, head_statistics
from sqrtdk.tracing.calls.finish import RowLimit
from sqrtdk.tracing.tensors import CallRows
from sqrtdk.tracing.trace import Trace
from tests.tolerances import complaint

HEADS, WIDTH, SCALE = 4, 8, 0.6
CAP = 3.0


class Attend(nn.Module):
    """Self-attention with a scale that is not the textbook's; every way of hiding keys."""

    def __init__(self, way: str, kv_heads: int, case: str) -> None:
        super().__init__()
        self.way, self.kv_heads, self.case = way, kv_heads, case
        self.q_proj = nn.Linear(16, HEADS * WIDTH)
        self.k_proj = nn.Linear(16, kv_heads * WIDTH)
        self.v_proj = nn.Linear(16, kv_heads * WIDTH)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (p(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        repeat = HEADS // self.kv_heads
        return q, k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)

    def mask(self, x: Tensor) -> Tensor | None:
        length = x.shape[1]
        shown = torch.ones(length, length, dtype=torch.bool)
        if self.case == "bool":
            return (torch.arange(length)[:, None] + torch.arange(length)) % 3 != 0
        if self.case == "blind":
            shown[2] = False
            return shown
        if self.case == "bias":
            return torch.linspace(-1, 1, length, dtype=x.dtype) * torch.ones(length, 1, dtype=x.dtype)
        return None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        mask, causal = self.mask(x), self.case in ("causal", "softcap")
        if self.way == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=SCALE)
        logits = q @ k.mT * SCALE
        if self.case == "softcap":
            logits = CAP * torch.tanh(logits / CAP)
        if causal:
            mask = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
        if mask is not None and mask.dtype == torch.bool:
            logits = logits.masked_fill(~mask, -math.inf)
            logits = logits - logits.amax(-1, keepdim=True) if self.way == "offset" else logits
        elif mask is not None:
            logits = logits + mask
        return logits.softmax(-1) @ v

    def dense(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and visible keys in float64."""
        exact = copy.deepcopy(self).double()
        with torch.no_grad():
            q, k, _ = exact.split(x.double())
            logits, mask = q @ k.mT * SCALE, exact.mask(x.double())
        if self.case == "softcap":
            logits = CAP * torch.tanh(logits / CAP)
        shown = torch.ones_like(logits, dtype=torch.bool)
        if self.case in ("causal", "softcap"):
            shown = shown.tril()
        elif mask is not None and mask.dtype == torch.bool:
            shown = shown & mask
        elif mask is not None:
            logits = logits + mask
        return logits, shown


def by_hand(logits: Tensor, shown: Tensor) -> dict[str, Tensor]:
    """The columns, from their definitions: (B, H, L, S) to one number a head."""
    logits, shown = (x.transpose(0, 1).flatten(1, 2) for x in (logits, shown))
    bad = (logits.isnan() & shown).any(-1)
    blind = ~shown.any(-1)
    columns: dict[str, list[float]] = {}
    for head in range(logits.shape[0]):
        rows = [z[v] for z, v, no in zip(logits[head], shown[head], bad[head] | blind[head], strict=True) if not no]
        p = [z.softmax(-1) for z in rows]
        entropy = torch.stack([torch.special.entr(x).sum() for x in p])
        most = torch.stack([z.max() for z in rows])
        choices = [i for i, z in enumerate(rows) if len(z) > 1]
        jacobians = [torch.linalg.matrix_norm(torch.diag(x) - torch.outer(x, x)).item() for x in p]
        values = {
            "rows": float(shown.shape[1]),
            "blind_rows": float(blind[head].sum()),
            "nan_rows": float(bad[head].sum()),
            "inf_rows": 0.0,
            "keys": mean([float(len(z)) for z in rows]),
            "max_logit": most.max().item(),
            "min_logit": min(z.min().item() for z in rows),
            "max_abs_logit": max(z.abs().max().item() for z in rows),
            "mean_logit": mean([z.mean().item() for z in rows]),
            "std_logit": math.sqrt(mean([z.var(correction=0).item() for z in rows])),
            "row_offset": max(abs(z.mean().item()) for z in rows),
            "entropy_nats": entropy.mean().item(),
            "entropy_fraction": mean([entropy[i].item() / math.log(len(rows[i])) for i in choices]),
            "saturated": mean([float(p[i].max() > 0.99) for i in choices]),
            "effective_keys": mean([1 / x.square().sum().item() for x in p]),
            "peak": mean([x.max().item() for x in p]),
            "peak_max": max(x.max().item() for x in p),
            "jacobian_norm": mean(jacobians),
        }
        for name, each in (("entropy", entropy), ("max_logit", most)):
            for q in (5, 50, 95):
                values[f"{name}_p{q:02d}"] = each.quantile(q / 100).item()
        for name, value in values.items():
            columns.setdefault(name, []).append(value)
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in columns.items()}


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def traced(model: nn.Module, x: Tensor, most: int | None = None) -> CallRows:
    with torch.no_grad(), Trace(model, stats=False, rows=RowLimit(most)) as run:
        model(x)
    (rows,) = run.rows
    assert rows is not None
    return rows


def columns(sums: HeadSums) -> dict[str, Tensor]:
    (found,) = head_statistics([sums])
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in found.items()}


def wrong(found: dict[str, Tensor], wanted: dict[str, Tensor], logits: Tensor, shown: Tensor) -> dict[str, str]:
    largest = float(logits[shown].nan_to_num().abs().max())
    length = shown.shape[-1] * WIDTH
    complaints = {
        name: complaint(found[name], value, torch.float32, length=length, logit=largest, magnitude=1.0)
        for name, value in wanted.items()
    }
    return {name: text for name, text in complaints.items() if text is not None}


def sharp(model: Attend, x: Tensor) -> None:
    """Some rows are one-hot, and no column is the same for all heads."""
    with torch.no_grad():
        model.q_proj.weight *= torch.linspace(1, 6, HEADS).repeat_interleave(WIDTH)[:, None]

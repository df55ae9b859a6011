"""Runs to show: small decoders that really train under `sqrtdk.watch`, and records in which everything went wrong."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sqrtdk
from sqrtdk.monitor.folder import RunWriter
from tests.monitor.run_records import unsigned

EVIL = "</script><script>document.title='owned'</script>\x1b[31m\u202e"
LONG = "model.decoder.transformer.layers.11.self_attention.inner"
STEPS, EVERY = 48, 4


class Attention(nn.Module):
    def __init__(self, scaled: bool) -> None:
        super().__init__()
        self.scaled = scaled
        self.qkv, self.out = nn.Linear(48, 144), nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (3, 16)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=None if self.scaled else 1.0)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """Two blocks of three heads on bytes."""

    def __init__(self, scaled: bool = True) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(128, 48), nn.Linear(48, 128)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(48), Attention(scaled)) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def train(folder: Path, *, scaled: bool = True, lr: float = 1e-3, steps: int = STEPS) -> Path:
    """Train a decoder on the text of the standard library, and record it."""
    torch.manual_seed(0)
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()[:60000])) % 128
    model = Decoder(scaled)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    with sqrtdk.watch(model, every=EVERY, to=folder, on_alarm=lambda alarm: None) as watch:
        for _ in range(steps):
            ids = text[torch.randint(len(text) - 25, (4, 1)) + torch.arange(25)]
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.step(loss)
    return folder


def make_all(folder: Path) -> None:
    """The runs of the fixture `runs`."""
    train(folder / "healthy")
    train(folder / "unscaled", scaled=False, lr=3e-2)
    write_sick(folder / "sick")


def head_row(step: int, site: str, head: int) -> dict[str, Any]:
    """One head, which grows worse from step to step; the odd ones have no gradients and no scale."""
    more: dict[str, Any] = {"scale_ratio": 4.0, "query_grad_p50": 1e-3 / step, "key_grad_p50": 1e-4}
    more |= {"query_grad_p95": 2e-3 / step, "key_grad_p95": 2e-4}
    more |= {"query_grad_nonfinite": 0.0, "key_grad_nonfinite": 0.0}
    largest = 2.0 + step * (head + 1) / 2
    quantiles = {"max_logit_p50": largest / 2, "max_logit_p95": largest - 1, "min_logit": -largest}
    entropies = {f"entropy_{name}": 3 / (1 + step / 10 + head) for name in ("nats", "p05", "p50", "p95")}
    return {
        "step": step,
        "site": site,
        "index": 0,
        "head": head,
        "rows": 64,
        "blind_rows": 0,
        "nan_rows": step // 40,
        "inf_rows": 0,
        "query_nonfinite": 0.0,
        "key_nonfinite": 0.0,
        "max_logit": largest,
        **quantiles,
        "max_abs_logit": largest,
        "mean_logit": -head / 4,
        "row_offset": head / 2,
        "max_product": 8 * largest,
        **entropies,
        "effective_keys": 64 / step,
        "peak_max": 1.0,
        "jacobian_norm": 0.25,
        "std_logit": 1.0 + step / 10,
        "entropy_fraction": 1 / (1 + step / 10 + head),
        "saturated": min(1.0, step / 60),
        "peak": step / 80,
        **(more if head % 2 == 0 else {}),
    }


def alarm_row(step: int, severity: str, **more: Any) -> dict[str, Any]:
    told = {"name": "max_logit", "severity": severity, "source": "a report", "text": f"a logit of {step}", "bar": 1.0}
    return {"step": step, "value": float(step), **told, **more}


def write_sick(folder: Path) -> Path:
    """Two attempts with steps missing between them, NaN as a loss, a step that failed, names that mean harm."""
    settings, model = {"every": 5}, {"class": "Decoder", "parameters": 12345, "note": EVIL}
    for first, last in ((1, 30), (41, 60)):
        with RunWriter(folder, model=model, settings=settings, first_step=first) as run:
            for start in range(first, last, 10):
                steps = range(start, start + 10)
                sampled = [step for step in steps if step % 5 == 0]
                sites = ["h.0.attn", LONG, *([EVIL] if start < 41 else [])]
                failed = 50
                heads = [
                    head_row(step, site, head)
                    for step in sampled
                    for site in sites
                    for head in range(3)
                    if step != failed
                ]
                run.write(heads, [step_row(step, failed) for step in steps], alarms_of(start))
    parts = sorted((folder / "parts").iterdir())
    last = unsigned(parts[-1])  # of an older version: the checksum would say it first
    last.write_bytes(parts[0].read_bytes())  # steps 51 to 60
    return folder


def step_row(step: int, failed: int) -> dict[str, Any]:
    """Losses fall, and are NaN from step 45 on; step 5 has none."""
    row: dict[str, Any] = {"step": step, "sampled": step % 5 == 0, "time": 0.0, "calls": 0, "unmeasured": 0}
    if step != 5:
        row["loss"] = math.nan if step >= 45 else 5.0 - step / 20
    if row["sampled"]:
        how = {"how": "not measured: no attention ran", "unmeasured": 1}
        row |= (
            how if step == failed else {"how": "as is", "calls": 3 if step < 41 else 2, "unmeasured": 1 + (step == 45)}
        )
    return row


def alarms_of(start: int) -> list[dict[str, Any]]:
    return {
        1: [
            alarm_row(5, "note", name="unmeasured", site="h.1.attn", index=0, text=f"h.1.attn: its {EVIL}"),
            alarm_row(5, "note", name="unmeasured", site="h.2.attn", index=0, text=f"h.2.attn: its {EVIL}"),
            alarm_row(10, "note", site="h.0.attn", index=0, head=2),
        ],
        11: [alarm_row(15, "warn", site=LONG, index=0, head=1), alarm_row(20, "fail", text=EVIL, source=EVIL)],
        41: [alarm_row(45, "critical", name="nonfinite", site="h.0.attn", index=0, head=0)],
    }.get(start, [])

"""What a step moves the weights of q and k by at rates right and too high, and whether the watch names the rate.

Decoders of 4 layers and width 128 learn the sources of the standard library, byte by byte, or to copy a string; a watch
samples every tenth step. Beside the rate the rows change what makes weights move without harm or logits large without
the rate: how the weights are drawn, a warm-up, weight decay, clipped gradients, an attention without its scale.

Each row says what is expected: no alarm `update`, or one. Exit code 1 where a row has the other.

    python benchmarks/learning_rates.py [--steps 150] [--json FILE]

`python scripts/rates_table.py` puts the record into the pages about `watch`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass
from datetime import date
from typing import Any

import torch
from torch import Tensor, nn

import sqrtdk
from sqrtdk._environment import cpu_name
from sqrtdk_lab.training.settings import BYTES, batch, stdlib_text

WIDTH, HEADS, LAYERS, LENGTH, ROWS = 128, 4, 4, 32, 4
EVERY, EARLY, FINAL, WARM_UP = 10, 30, 20, 50  # steps
LETTERS, COPIED = 32, 16  # of the task of copying
UNSCALED = 2  # the attention that may lack its scale


@dataclass(frozen=True)
class Row:
    """One run.

    Attributes:
        rate: largest learning rate.
        alarm: whether the watch has to name the rate.
        optimizer: "AdamW" or "SGD".
        deviation: of the drawn weights; None: 1/sqrt(width).
        warm_up, decay, clip, unscaled: what else is changed.
        seed: of weights and batches.
        before: steps at a rate of 1e-3 that are trained before, without a watch.
        task: "text" or "copying".
    """

    rate: float
    alarm: bool = False
    optimizer: str = "AdamW"
    deviation: float | None = None
    warm_up: bool = False
    decay: float = 0.0
    clip: bool = False
    unscaled: bool = False
    seed: int = 0
    before: int = 0
    task: str = "text"


TABLE = (
    Row(3e-4),
    Row(1e-3),
    Row(1e-3, warm_up=True),
    Row(1e-3, unscaled=True),
    Row(1e-3, before=150),
    Row(5e-3),
    Row(1e-3, deviation=0.02),
    Row(1e-3, deviation=0.02, decay=0.1),
    Row(3e-3, deviation=0.02, warm_up=True, clip=True),
    Row(0.1, optimizer="SGD"),
    Row(1e-3, task="copying"),
    Row(2e-2, True),
    Row(2e-2, True, seed=1),
    Row(2e-2, True, unscaled=True),
    Row(2e-2, True, warm_up=True),
    Row(2e-2, True, before=150),
    Row(1e-2, True, deviation=0.02),
    Row(2e-2, True, deviation=0.02),
    Row(2e-2, True, deviation=0.02, warm_up=True, clip=True, decay=0.1),
    Row(2e-2, True, task="copying"),
)


class Block(nn.Module):
    """Causal attention and a perceptron, each behind its norm."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (part(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.query, self.key, self.value))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """Symbols (B, L) to the logits of the next one (B, L, 256)."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(BYTES, WIDTH), nn.Embedding(LENGTH, WIDTH)
        right = (WIDTH // HEADS) ** -0.5
        self.blocks = nn.ModuleList(Block(1.0 if row.unscaled and i == UNSCALED else right) for i in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, BYTES)
        for weights in self.parameters():
            if weights.ndim == 2:
                nn.init.normal_(weights, std=row.deviation or WIDTH**-0.5)

    def forward(self, symbols: Tensor) -> Tensor:
        x = self.embed(symbols) + self.position.weight[: symbols.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def task_of(row: Row, text: Tensor, data: torch.Generator) -> tuple[Tensor, Tensor]:
    """A batch, and what has to follow each symbol of it; -100 where that cannot be known."""
    if row.task == "text":
        return batch(text, ROWS, LENGTH, data)
    letters = torch.randint(LETTERS, (ROWS, COPIED), generator=data)
    following = torch.cat((letters, letters), 1).roll(-1, 1)
    following[:, : COPIED - 1] = following[:, -1] = -100
    return torch.cat((letters, letters), 1), following


def run(row: Row, text: Tensor, steps: int) -> dict[str, Any]:
    """Train as a row says, and tell what the watch saw."""
    torch.manual_seed(row.seed)
    data = torch.Generator().manual_seed(row.seed)
    model = Decoder(row)
    made = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD}[row.optimizer]
    optimizer = made(model.parameters(), 1e-3, weight_decay=row.decay)

    def one_step() -> Tensor:
        symbols, following = task_of(row, text, data)
        loss = nn.functional.cross_entropy(model(symbols).flatten(0, 1), following.flatten())
        loss.backward()
        if row.clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for _ in range(row.before):
        one_step()
    losses, logits, moved = [], [], {}
    with sqrtdk.watch(model, every=EVERY, on_alarm=lambda alarm: None, optimizer=optimizer) as watch:
        for step in range(steps):
            rate = row.rate * min(1.0, (step + 1) / WARM_UP) if row.warm_up else row.rate
            for group in optimizer.param_groups:
                group["lr"] = rate
            losses.append(float(loss := one_step()))
            watch.step(loss)
        for sample in watch.samples:
            moved[sample.step] = sample.relative_step
            logits += [logit for call in sample.measured for logit in call.columns["max_logit"]]
        alarms = {alarm.name: alarm.step for alarm in reversed(watch.alarms)}
    return {
        **asdict(row),
        "loss": sum(losses[-FINAL:]) / FINAL,
        "largest_logit": max(logit for logit in logits if not math.isnan(logit)),
        "moved": [moved.get(EARLY), moved[max(moved)]],
        "named_at": alarms.get("update"),
        "scale_named": "scale_ledger" in alarms,
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--json")
    options = parser.parse_args()
    text, _ = stdlib_text()
    rows, wrong = [], 0
    for row in TABLE:
        rows.append(found := run(row, text, options.steps))
        as_expected = (found["named_at"] is not None) == row.alarm and found["scale_named"] == row.unscaled
        wrong += not as_expected
        changed = {name: value for name, value in asdict(row).items() if value != getattr(Row(0.0), name)}
        said = {name: found[name] for name in ("loss", "largest_logit", "moved", "named_at", "scale_named")}
        print(changed, said, "" if as_expected else "NOT AS EXPECTED", flush=True)
    record = {
        "benchmark": "learning_rates",
        "date": date.today().isoformat(),
        "steps": options.steps,
        "torch": torch.__version__,
        "machine": cpu_name(),
        "rows": rows,
    }
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=1)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()

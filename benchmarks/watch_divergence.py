"""How long before its loss diverges a run is announced: three causes and healthy runs, on real text.

A decoder of a few layers and width 64 learns the sources of the standard library, byte by byte, with attention written
out (its logits are stored), warm-up and a constant rate. Every broken arm trains in a way that breaks it, and has a
control that differs in one thing:

- `no_scale`: q . k without 1/sqrt(d), no norm before the attention, and AdamW at a rate that is too high for it;
  control: the same with 1/sqrt(d);
- `muon`: orthogonalised momentum (Newton and Schulz) without weight decay, at a rate that lets the logits grow, no
  norm before the attention; control: a fiftieth of the rate; `muon fast`, at twice the rate, diverges soon after the
  warm-up;
- `fp16`: the product q . k stored in float16, which ends at 65504, under the same optimizer, with norms; control: the
  product in float32;
- `healthy`: the textbook scale, norms, AdamW at a rate that trains.

Announced: the first alarm of severity warn or above. Diverged: the first step from which the loss stays above its least
value so far by `MARGIN` nats to the end of the run, or is not finite. Lead: the steps between. Exit code 1 where a
broken run does not diverge or has a lead below `LEAD`, or a healthy one raises an alarm of warn or above; what becomes
of the controls is told, not judged. Intervals are at 99%.

    python benchmarks/watch_divergence.py [--seeds 5] [--steps 200] [--every 5] [--arms NAME ...] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

import sqrtdk
from sqrtdk._machine import cpu_name
from sqrtdk.lab.intervals import mean, proportion
from sqrtdk.lab.training.text import BYTES, batch, stdlib_text
from sqrtdk.monitor.samples import Alarm
from sqrtdk.monitor.watch import LOUD, Watch

WIDTH, HEADS, LAYERS, LENGTH, ROWS = 64, 4, 3, 64, 8
MARGIN = 1.0  # nats above the least loss: several times the spread of one batch's loss
SETTLED = 10  # least steps that "to the end" covers
LEAD = 20
WARM_UP = 30  # steps


class Attention(nn.Module):
    """Causal attention, written out.

    Args:
        scale: on the product.
        dtype: in which product and logits are stored.
    """

    def __init__(self, scale: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.value = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale, self.dtype = scale, dtype

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.query, self.key, self.value))
        logits = q.to(self.dtype) @ k.to(self.dtype).mT * self.scale
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = logits.masked_fill(hidden, -math.inf).softmax(-1, dtype=torch.float32)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, scale: float, dtype: torch.dtype, normed: bool) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.RMSNorm(WIDTH) if normed else nn.Identity(), nn.RMSNorm(WIDTH)
        self.attention = Attention(scale, dtype)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """Bytes (B, L) to the logits of the next one (B, L, 256).

    Args:
        scale: of the attentions.
        dtype: of their products.
        normed: with a norm before each attention and before the last layer.
    """

    def __init__(
        self, scale: float = (WIDTH // HEADS) ** -0.5, dtype: torch.dtype = torch.float32, normed: bool = True
    ) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(BYTES, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(scale, dtype, normed) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH) if normed else nn.Identity()
        self.head = nn.Linear(WIDTH, BYTES, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embed(text) + self.position.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Muon(torch.optim.Optimizer):
    """Momentum of each matrix, orthogonalised by the iteration of Newton and Schulz; no weight decay."""

    def __init__(self, matrices: list[nn.Parameter], lr: float) -> None:
        super().__init__(matrices, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for matrix in group["params"]:
                momentum = self.state[matrix].setdefault("momentum", torch.zeros_like(matrix))
                momentum.mul_(0.95).add_(matrix.grad)
                matrix.sub_(orthogonal(momentum), alpha=group["lr"])


def orthogonal(matrix: Tensor) -> Tensor:
    """About the nearest matrix with singular values of 1: X <- 1.5 X - 0.5 X X^T X, from spectral norm at most 1."""
    x = matrix / matrix.norm().clamp_min(1e-12)
    for _ in range(8):
        x = 1.5 * x - 0.5 * x @ x.mT @ x
    return x


def adamw(model: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.95))]


def muon(model: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "blocks" in name]
    rest = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    return [Muon(matrices, rate), torch.optim.AdamW(rest, 3e-3, betas=(0.9, 0.95))]


def nothing(model: nn.Module, watch: Watch) -> None:
    """After a step: nothing is repaired."""


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        build: the model.
        optimizers: of a model and a rate.
        rate: largest learning rate.
        expected: "diverges", "healthy", or "" for a control.
        after: what is done to the model after each step, as a repair would.
    """

    build: Callable[[], Decoder]
    optimizers: Callable[[nn.Module, float], list[torch.optim.Optimizer]]
    rate: float
    expected: str = "diverges"
    after: Callable[[nn.Module, Watch], None] = nothing


ARMS = {
    "no_scale": Arm(lambda: Decoder(scale=1.0, normed=False), adamw, 0.02),
    "no_scale control": Arm(lambda: Decoder(normed=False), adamw, 0.02, ""),
    "muon": Arm(lambda: Decoder(normed=False), muon, 0.05),
    "muon fast": Arm(lambda: Decoder(normed=False), muon, 0.1, ""),
    "muon control": Arm(lambda: Decoder(normed=False), muon, 0.001, ""),
    "fp16": Arm(lambda: Decoder(dtype=torch.float16), muon, 1.0),
    "fp16 control": Arm(Decoder, muon, 1.0, ""),
    "healthy": Arm(Decoder, adamw, 3e-3, "healthy"),
}


def train(arm: Arm, text: Tensor, seed: int, steps: int, every: int) -> tuple[list[float], list[Alarm]]:
    """Losses and alarms; the run ends once its loss is not finite."""
    torch.manual_seed(seed)
    model, losses = arm.build(), []
    optimizers = arm.optimizers(model, arm.rate)
    groups = [(group, group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    data = torch.Generator().manual_seed(seed)
    with sqrtdk.watch(model, every=every, on_alarm=lambda alarm: None) as watch:
        for step in range(steps):
            for group, peak in groups:
                group["lr"] = peak * min(1.0, (step + 1) / WARM_UP)
            window, following = batch(text, ROWS, LENGTH, data)
            loss = nn.functional.cross_entropy(model(window).flatten(0, 1), following.flatten())
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            watch.step(loss)
            arm.after(model, watch)
            losses.append(float(loss.detach()))
            if not math.isfinite(losses[-1]):
                break
        return losses, list(watch.alarms)


def diverged_at(losses: list[float]) -> int | None:
    """The step (from 1) from which the loss stays `MARGIN` above its least value so far; None where it does not."""
    broken = not math.isfinite(losses[-1])
    finite = losses[:-1] if broken else losses
    least = list(accumulate(finite, min, initial=math.inf))
    first, rest = len(finite), math.inf
    while first and (rest := min(rest, finite[first - 1])) > least[first - 1] + MARGIN:
        first -= 1
    return first + 1 if broken or len(finite) - first >= SETTLED else None


def result(arm: Arm, text: Tensor, seed: int, steps: int, every: int) -> dict[str, Any]:
    """What became of one run."""
    losses, alarms = train(arm, text, seed, steps, every)
    loud = [alarm for alarm in alarms if alarm.severity in LOUD]
    diverged = diverged_at(losses)
    first: dict[str, int] = {}
    for alarm in loud:
        first.setdefault(alarm.name, alarm.step)
    return {
        "seed": seed,
        "steps": len(losses),
        "diverged": diverged,
        "announced": loud[0].step if loud else None,
        "lead": diverged - loud[0].step if loud and diverged is not None else None,
        "first_by_alarm": first,
        "alarms": len(loud),
        "notes": len(alarms) - len(loud),
        "least_loss": min(losses),
        "losses": [round(loss, 3) if math.isfinite(loss) else None for loss in losses[::10]],
    }


def summary(arm: Arm, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures over the seeds, and whether they are what was expected."""
    leads = [run["lead"] for run in runs if run["lead"] is not None]
    silent = sum(run["alarms"] == 0 for run in runs)
    early = sum(lead >= LEAD for lead in leads)
    found: dict[str, Any] = {
        "diverged": sum(run["diverged"] is not None for run in runs),
        "silent": asdict(proportion("runs_without_a_warning", silent, len(runs))),
        "early": asdict(proportion(f"runs_announced_{LEAD}_steps_before", early, len(runs))),
        "least_lead": min(leads, default=None),
    }
    if len(leads) > 1:
        found["mean_lead"] = asdict(mean("lead_steps", [float(lead) for lead in leads]))
    wanted = {"diverges": early, "healthy": silent, "": len(runs)}[arm.expected]
    return found | {"as_expected": wanted == len(runs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--arms", nargs="*", choices=ARMS, default=list(ARMS))
    parser.add_argument("--json")
    options = parser.parse_args()
    text, _ = stdlib_text()
    arms: dict[str, Any] = {}
    for name in options.arms:
        arm, runs = ARMS[name], []
        for seed in range(options.seeds):
            run = result(arm, text, seed, options.steps, options.every)
            runs.append(run)
            words = {key: run[key] for key in ("seed", "diverged", "announced", "lead", "alarms", "notes")}
            print(f"{name:18s} {words} least loss {run['least_loss']:.2f} {run['first_by_alarm']}", flush=True)
        arms[name] = {"rate": arm.rate, "expected": arm.expected, **summary(arm, runs), "runs": runs}
        lead = arms[name].get("mean_lead")
        words = f"{lead['value']:.1f} [{lead['low']:.1f}, {lead['high']:.1f}] steps" if lead else "none"
        print(f"{name:18s} diverged {arms[name]['diverged']} of {len(runs)}, mean lead {words}\n")
    record = {
        "benchmark": "watch_divergence",
        "model": f"{LAYERS} layers, width {WIDTH}, {HEADS} heads, {ROWS} windows of {LENGTH} bytes a step",
        "steps": options.steps,
        "every": options.every,
        "margin_nats": MARGIN,
        "torch": torch.__version__,
        "machine": cpu_name(),
        "arms": arms,
    }
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=1)
    if not all(arm["as_expected"] for arm in arms.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()

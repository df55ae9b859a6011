"""How long before its loss diverges a run is announced, and whether QK-clip keeps it: three causes, on real text.

A decoder of a few layers and width 64 learns the sources of the standard library, byte by byte, with attention written
out (its logits are stored), warm-up and a constant rate. Every broken arm trains in a way that breaks it, and has a
control that differs in one thing:

- `no_scale`: q . k without 1/sqrt(d), no norm before the attention, and AdamW at a rate that is too high for it;
  control: the same with 1/sqrt(d);
- `muon`: orthogonalised momentum (Newton and Schulz) of the attention's matrices without weight decay, at a rate that
  lets the logits grow, no norm before the attention; control: a sixtieth of the rate; `muon fast`: of all matrices of
  the blocks, at a rate at which the run diverges soon after the warm-up;
- `fp16`: the product q . k stored in float16, which ends at 65504, under the same optimizer for all matrices, with
  norms; control: the product in float32;
- `healthy`: the textbook scale, norms, AdamW at a rate that trains.

Without a norm before the attention large logits feed on the stream that they make. With one (`no_scale normed`,
`muon normed`), the logits of models this small grow as the alarms say, and the loss does not diverge: told, not judged.

`clipped` arms are the same runs with `qk_clip_(model, watch, CLIP)` after every step, all of them sampled. The rates
are so high that one step may add more to a logit than a clip has left: `largest_logits` are those of each training
forward pass, before its clip, `largest_logits_after_clip` those of the same batch after the step and the clip. Cured:
no forward pass of the training has a logit of `ALARM`, and the final loss, the mean of the last `FINAL` steps, is at
most `TRAINS` nats above that of the healthy runs.

Announced: the first alarm of severity warn or above. Diverged: the first step from which the loss stays above its least
value so far by `MARGIN` nats to the end of the run, or is not finite. Lead: the steps between. Exit code 1 where a
broken run does not diverge or has a lead below `LEAD`, a clipped one is not cured, or a healthy one raises an alarm of
warn or above; what becomes of the controls is told, not judged. Intervals are at 99%.

    python benchmarks/watch_divergence.py [--seeds 5] [--steps 200] [--every 5] [--arms NAME ...] [--jobs 1]
        [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

import sqrtdk
from sqrtdk._environment import cpu_name
from sqrtdk.monitor.samples import Alarm
from sqrtdk.monitor.watch import LOUD
from sqrtdk_lab.intervals import mean, proportion
from sqrtdk_lab.training.settings import BYTES, batch, stdlib_text

WIDTH, HEADS, LAYERS, LENGTH, ROWS = 64, 4, 3, 64, 8
MARGIN = 1.0  # nats above the least loss: several times the spread of one batch's loss
SETTLED = 10  # least steps that "to the end" covers
LEAD = 20
WARM_UP = 30  # steps
CLIP = 20.0  # where the clip acts: it leaves room for what one step of these rates may add
ALARM = 100.0  # the threshold to stay under: the bar of the alarms, and where Kimi K2 clips
LOOK = 10  # steps from one look at what a clip has left to the next
FINAL = 20  # steps whose mean is the final loss
TRAINS = 0.75  # nats that the final loss of a run that trains may be above that of healthy ones


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
    return _with_muon(model, matrices, rate)


def muon_attention(model: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    return _with_muon(model, [p for name, p in model.named_parameters() if "attention" in name], rate)


def _with_muon(model: nn.Module, matrices: list[nn.Parameter], rate: float) -> list[torch.optim.Optimizer]:
    rest = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    return [Muon(matrices, rate), torch.optim.AdamW(rest, 3e-3, betas=(0.9, 0.95))]


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        build: the model.
        optimizers: of a model and a rate.
        rate: largest learning rate.
        expected: "diverges", "healthy", "cured", or "" for what is told and not judged.
        threshold: of the QK-clip after each step; None: none.
    """

    build: Callable[[], Decoder]
    optimizers: Callable[[nn.Module, float], list[torch.optim.Optimizer]]
    rate: float
    expected: str = "diverges"
    threshold: float | None = None


ARMS = {
    "no_scale": Arm(lambda: Decoder(scale=1.0, normed=False), adamw, 0.015),
    "no_scale clipped": Arm(lambda: Decoder(scale=1.0, normed=False), adamw, 0.015, "cured", CLIP),
    "no_scale control": Arm(lambda: Decoder(normed=False), adamw, 0.015, ""),
    "no_scale normed": Arm(lambda: Decoder(scale=1.0), adamw, 0.015, ""),
    "muon": Arm(lambda: Decoder(normed=False), muon_attention, 0.06),
    "muon clipped": Arm(lambda: Decoder(normed=False), muon_attention, 0.06, "cured", CLIP),
    "muon control": Arm(lambda: Decoder(normed=False), muon_attention, 0.001, ""),
    "muon normed": Arm(Decoder, muon_attention, 0.06, ""),
    "muon fast": Arm(lambda: Decoder(normed=False), muon, 0.1, ""),
    "fp16": Arm(lambda: Decoder(dtype=torch.float16), muon, 1.0),
    "fp16 clipped": Arm(lambda: Decoder(dtype=torch.float16), muon, 1.0, "cured", CLIP),
    "fp16 control": Arm(Decoder, muon, 1.0, ""),
    "healthy": Arm(Decoder, adamw, 3e-3, "healthy"),
}


@dataclass
class Run:
    """What a run left.

    Attributes:
        losses: of each step.
        alarms: all of them.
        before: largest logit of each sampled forward pass of the training.
        after: largest logit of the same batch once the step was made and clipped, each `LOOK` steps.
    """

    losses: list[float] = field(default_factory=list)
    alarms: list[Alarm] = field(default_factory=list)
    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)


def largest(columns: Iterable[Sequence[float]]) -> float:
    """The largest of all heads; NaN, where some of them have none, is left out."""
    return max((logit for each in columns for logit in each if not math.isnan(logit)), default=math.nan)


def train(arm: Arm, text: Tensor, seed: int, steps: int, every: int) -> Run:
    """One run; it ends once its loss is not finite."""
    torch.manual_seed(seed)
    model, run = arm.build(), Run()
    optimizers = arm.optimizers(model, arm.rate)
    groups = [(group, group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    data = torch.Generator().manual_seed(seed)
    every = 1 if arm.threshold is not None else every  # Kimi K2 clips after each step
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
            if arm.threshold is not None:
                sqrtdk.qk_clip_(model, watch, arm.threshold)
                if (step + 1) % LOOK == 0:
                    with watch.paused(), torch.no_grad(), sqrtdk.trace(model, numeric=False) as again:
                        model(window)
                    run.after.append(largest(call.stats.max_logit for call in again.calls if call.stats is not None))
            if (sample := watch.last_sample()) is not None:
                run.before.append(largest(call.columns.get("max_logit", ()) for call in sample.calls))
            run.losses.append(float(loss.detach()))
            if not math.isfinite(run.losses[-1]):
                break
        run.alarms = list(watch.alarms)
    return run


def diverged_at(losses: list[float]) -> int | None:
    """The step (from 1) from which the loss stays `MARGIN` above its least value so far; None where it does not."""
    broken = not math.isfinite(losses[-1])
    finite = losses[:-1] if broken else losses
    least = list(accumulate(finite, min, initial=math.inf))
    first, rest = len(finite), math.inf
    while first and (rest := min(rest, finite[first - 1])) > least[first - 1] + MARGIN:
        first -= 1
    return first + 1 if broken or len(finite) - first >= SETTLED else None


def result(task: tuple[str, int, int, int]) -> dict[str, Any]:
    """What became of one run: arm, seed, steps, steps from one sample to the next."""
    name, seed, steps, every = task
    torch.set_num_threads(1)
    text, _ = stdlib_text()
    run = train(ARMS[name], text, seed, steps, every)
    losses, alarms = run.losses, run.alarms
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
        "final_loss": sum(losses[-FINAL:]) / FINAL if math.isfinite(losses[-1]) and len(losses) == steps else None,
        "losses": [round(loss, 3) if math.isfinite(loss) else None for loss in losses[::10]],
        "largest_logits": [round(logit, 1) if math.isfinite(logit) else None for logit in run.before],
        "largest_logits_after_clip": [round(logit, 1) if math.isfinite(logit) else None for logit in run.after],
    }


def cured(run: dict[str, Any], threshold: float, bar: float) -> bool:
    """Whether a clipped run trains, and stays under the threshold as far as a clip of the last step's maxima can.

    A clip is by what the step's forward pass had, and the step moves the weights besides: what the next pass has may be
    above the threshold by the growth of one step, but not by so much that it is alarming.
    """
    final, before, after = run["final_loss"], run["largest_logits"], run["largest_logits_after_clip"]
    bounded = None not in before and None not in after and max(before) < ALARM
    return run["diverged"] is None and final is not None and final <= bar and bounded


def summary(arm: Arm, runs: list[dict[str, Any]], bar: float) -> dict[str, Any]:
    """Figures over the seeds, and whether they are what was expected; `bar`: the final loss of a run that trains."""
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
    finals = [run["final_loss"] for run in runs if run["final_loss"] is not None]
    if len(finals) > 1:
        found["final_loss"] = asdict(mean("final_loss_nats", finals))
    cures = 0
    if arm.threshold is not None:
        cures = sum(cured(run, arm.threshold, bar) for run in runs)
        found["cured"] = asdict(proportion("runs_that_train_under_the_threshold", cures, len(runs)))
        for name in ("largest_logits", "largest_logits_after_clip"):
            each = [logit for run in runs for logit in run[name] if logit is not None]
            found[name] = {
                "largest": max(each),
                "median": statistics.median(each),
                "at_most_the_threshold": sum(logit <= arm.threshold for logit in each) / len(each),
            }
    wanted = {"diverges": early, "healthy": silent, "cured": cures, "": len(runs)}[arm.expected]
    return found | {"as_expected": wanted == len(runs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--arms", nargs="*", choices=ARMS, default=list(ARMS))
    parser.add_argument("--jobs", type=int, default=1, help="processes; the figures are the same")
    parser.add_argument("--json")
    options = parser.parse_args()
    names = [name for name in ARMS if name in {*options.arms, "healthy"}]  # whose loss is the others' bar
    tasks = [(name, seed, options.steps, options.every) for name in names for seed in range(options.seeds)]
    with torch.multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        results = []
        for task, run in zip(tasks, pool.imap(result, tasks), strict=True):
            results.append(run)
            words = {key: run[key] for key in ("seed", "diverged", "announced", "lead", "alarms", "notes")}
            ended = "none" if run["final_loss"] is None else f"{run['final_loss']:.2f}"
            print(f"{task[0]:18s} {words} final loss {ended} {run['first_by_alarm']}", flush=True)
    by_arm = {name: [run for task, run in zip(tasks, results, strict=True) if task[0] == name] for name in names}
    finals = [run["final_loss"] for run in by_arm["healthy"] if run["final_loss"] is not None]
    bar = sum(finals) / len(finals) + TRAINS
    arms: dict[str, Any] = {}
    for name, runs in by_arm.items():
        arm = ARMS[name]
        settings = {"rate": arm.rate, "expected": arm.expected, "threshold": arm.threshold}
        found = arms[name] = {**settings, **summary(arm, runs, bar), "runs": runs}
        lead = found.get("mean_lead")
        words = f"{lead['value']:.1f} [{lead['low']:.1f}, {lead['high']:.1f}] steps" if lead else "none"
        print(f"{name:18s} diverged {found['diverged']} of {len(runs)}, mean lead {words}", end="")
        if arm.threshold is not None:
            parts = (found[key] for key in ("largest_logits", "largest_logits_after_clip"))
            before, after = (f"{100 * part['at_most_the_threshold']:.0f}%, {part['largest']:.1f}" for part in parts)
            print(
                f"; cured {found['cured']['value']:.0%}; under {arm.threshold:g}, and largest: {before}; after {after}",
                end="",
            )
        print(f"; as expected: {found['as_expected']}\n")
    record = {
        "benchmark": "watch_divergence",
        "date": date.today().isoformat(),
        "model": f"{LAYERS} layers, width {WIDTH}, {HEADS} heads, {ROWS} windows of {LENGTH} bytes a step",
        "steps": options.steps,
        "every": options.every,
        "margin_nats": MARGIN,
        "final_loss_bar_nats": bar,
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

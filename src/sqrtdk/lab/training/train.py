"""Trains one small model and tells how it went: `train(cell)`, a function of the cell alone."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk.lab.claim import stable_seed
from sqrtdk.lab.training.models import AuxOutputs, Decoder, EncoderDecoder, start
from sqrtdk.lab.training.observe import head_figures, logit_figures, query_gradients
from sqrtdk.lab.training.settings import BYTES, LETTERS, Settings, batch, learning_rate, stdlib_text, strings

HELD_OUT_BATCHES, HELD_OUT_ROWS = 16, 32
MODELS: dict[str, type[Decoder] | type[EncoderDecoder]] = {"decoder": Decoder, "encoder_decoder": EncoderDecoder}
CHANCE = {"decoder": math.log(BYTES), "encoder_decoder": math.log(LETTERS)}  # nats a symbol
_text = cache(stdlib_text)

Data = tuple[Tensor, Tensor]


def train(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Train one model with AdamW, warm-up and cosine decay, gradients clipped at norm 1.

    Args:
        cell: JSON data, see `Settings`.

    Returns:
        JSON data: `held_out`, the loss in nats a symbol on data that no run trains on, None where the run diverged;
        `diverged_at`, the updates before the first loss that is not finite, or None; `curves`, lists of equal length
        over `step`: `loss` (mean training loss since the last entry), `max_logit`, `min_logit`, `entropy_share`,
        `gradient_p10`, `gradient_p50`, `gradient_p90`; `heads`, see `head_figures`, for decoders of several heads, at
        the start and the end; `parameters`; `cpu_s`, the one entry that differs from run to run.

    Raises:
        InvalidValueError: the cell has an unknown entry or a value out of range.

    Example:
        >>> cell = Settings("encoder_decoder", head_dim=4, rate=1e-2, seed=0, steps=4, rows=2, width=8, points=2).cell()
        >>> result = train(cell)
        >>> result["curves"]["step"], result["diverged_at"]
        ([0, 3], None)
    """
    settings = Settings.of(cell)
    began = time.process_time()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums in the order of one thread, whatever the process had
    try:
        return _train(settings) | {"cpu_s": round(time.process_time() - began, 3)}
    finally:
        torch.set_num_threads(threads)


def _train(settings: Settings) -> dict[str, Any]:
    with torch.random.fork_rng(devices=[]):  # modules draw weights as they are built; ours replace them
        model = MODELS[settings.model](settings)
    start(model, settings, _generator(settings, "weights"))
    held_out = _held_out(settings)
    heads = {"start": _heads(model, settings, held_out)}
    curves, diverged_at = _fit(model, settings, held_out[0])
    heads["end"] = _heads(model, settings, held_out)
    loss = _held_out_loss(model, settings, held_out) if diverged_at is None else math.inf
    if diverged_at is None and not math.isfinite(loss):
        diverged_at = settings.steps  # by the last update
    return {
        "held_out": loss if diverged_at is None else None,
        "diverged_at": diverged_at,
        "curves": curves,
        "heads": heads if heads["end"] else {},
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def _fit(model: nn.Module, settings: Settings, probe: Data) -> tuple[dict[str, list[float]], int | None]:
    """Train; curves at `points` steps, the first and the last among them, and the step that was not finite."""
    data = _generator(settings, "data")
    parameters = list(model.parameters())
    optimizer = _optimizer(parameters)
    observed = {round(i * (settings.steps - 1) / max(1, settings.points - 1)) for i in range(settings.points)}
    curves: dict[str, list[float]] = {"step": []}
    since: list[float] = []
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, settings.steps, settings.rate, warm_up=max(1, settings.steps // 20))
        loss = _loss(model, settings, _batch(settings, settings.rows, data))
        since.append(loss.item())
        if not math.isfinite(since[-1]):
            return curves, step
        if step in observed:  # before the update: loss, gradients and logits are those of the same weights
            found = {"loss": sum(since) / len(since)} | logit_figures(
                lambda record: _forward(model, settings, probe, record)
            )
            since = []
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if step in observed:
            for name, value in {"step": step, **found, **query_gradients(model)}.items():
                curves.setdefault(name, []).append(value)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    return curves, None


def _optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    matrices = [p for p in parameters if p.ndim == 2]
    rest = [p for p in parameters if p.ndim != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], betas=(0.9, 0.95), fused=True)


def _generator(settings: Settings, what: str) -> torch.Generator:
    """Runs that differ in the score, the scale or the rate see the same data, and where shapes agree start alike."""
    return torch.Generator().manual_seed(stable_seed([what, settings.model, settings.seed]))


def _batch(settings: Settings, rows: int, generator: torch.Generator, held_out: bool = False) -> Data:
    if settings.model == "decoder":
        return batch(_text()[held_out], rows, settings.length, generator)
    return strings(rows, settings.length, generator)


def _held_out(settings: Settings) -> list[Data]:
    generator = torch.Generator().manual_seed(stable_seed(["held out", settings.model]))
    return [_batch(settings, HELD_OUT_ROWS, generator, held_out=True) for _ in range(HELD_OUT_BATCHES)]


def _autocast(settings: Settings) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16, enabled=settings.precision == "bfloat16")


def _forward(model: nn.Module, settings: Settings, data: Data, record: AuxOutputs | None = None) -> Tensor:
    inputs = data if settings.model == "encoder_decoder" else data[:1]
    with _autocast(settings):
        logits: Tensor = model(*inputs, record=record)
    return logits


def _loss(model: nn.Module, settings: Settings, data: Data) -> Tensor:
    return nn.functional.cross_entropy(_forward(model, settings, data).float().flatten(0, 1), data[1].flatten())


@torch.no_grad()
def _held_out_loss(model: nn.Module, settings: Settings, batches: list[Data]) -> float:
    return sum(_loss(model, settings, data).item() for data in batches) / len(batches)


def _heads(model: nn.Module, settings: Settings, held_out: list[Data]) -> list[dict[str, Any]]:
    if settings.heads == 1 or not isinstance(model, Decoder):
        return []
    return head_figures(model, held_out[0][0])

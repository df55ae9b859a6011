"""Trains one small model and returns its history: `train(cell)`, a function of the cell alone.

During training, logits, entropy and gradients are measured, and how far the heads of an attention differ. Measuring
changes no number of the run. Heads differ in where they look and in what they read. Where: the Jensen-Shannon
divergence of the weights of two heads in the same row, over log 2: 0 for equal weights, 1 if no key has weight in both.
What: the overlap of the subspaces that their query (or key) projections read, the mean squared cosine of the principal
angles: 1 for equal subspaces, d_k / d_model on average for random ones.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cache
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk.nn import MultiHeadAttention
from sqrtdk_lab._costs import one_thread
from sqrtdk_lab.claim import stable_seed
from sqrtdk_lab.training.models import Attention, AuxOutputs, Decoder, EncoderDecoder, start, weights_of
from sqrtdk_lab.training.settings import BYTES, LETTERS, TrainingSettings, batch, learning_rate, stdlib_text, strings

HELD_OUT_BATCHES, HELD_OUT_ROWS = 16, 32
MODELS: dict[str, type[Decoder] | type[EncoderDecoder]] = {"decoder": Decoder, "encoder_decoder": EncoderDecoder}
CHANCE_LOSS = {"decoder": math.log(BYTES), "encoder_decoder": math.log(LETTERS)}  # nats a symbol
_text = cache(stdlib_text)

Data = tuple[Tensor, Tensor]


def train(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Train one model with AdamW, warm-up and cosine decay, gradients clipped at norm 1.

    Args:
        cell: JSON data, see `TrainingSettings`.

    Returns:
        JSON data: `held_out`, the loss in nats a symbol on data that no run trains on, None if the run diverged;
        `diverged_at`, the updates before the first loss that is not finite, or None; `curves`, lists of equal length
        over `step`: `loss` (mean training loss since the last entry), `max_logit`, `min_logit`, `logit_std`,
        `entropy_share`, `gradient_p10`, `gradient_p50`, `gradient_p90`; `heads`, see `head_figures`, for decoders of
        several heads, at the start and the end; `noise_costs`, see `noise_costs`, None if the run diverged;
        `parameters`; `cpu_s`, the one entry that differs from run to run.

    Raises:
        InvalidValueError: the cell has an unknown entry or a value out of range.

    Example:
        >>> run = TrainingSettings("encoder_decoder", head_dim=4, rate=1e-2, seed=0, steps=4, rows=2, width=8, points=2)
        >>> result = train(run.cell())
        >>> result["curves"]["step"], result["diverged_at"]
        ([0, 3], None)
    """
    with one_thread():  # the sum order of one thread, whatever the process uses
        return trained(TrainingSettings.of(cell))[1]


def trained(settings: TrainingSettings) -> tuple[nn.Module, dict[str, Any]]:
    """Return a trained model and what `train` returns."""
    began = time.process_time()
    with torch.random.fork_rng(devices=[]):  # modules draw weights when built, which ours replace
        model = MODELS[settings.model](settings)
    start(model, settings, _generator(settings, "weights"))
    held_out = _held_out(settings)
    heads = {"start": _heads(model, settings, held_out)}
    curves, diverged_at = _fit(model, settings, held_out[0])
    heads["end"] = _heads(model, settings, held_out)
    loss = _held_out_loss(model, settings, held_out) if diverged_at is None else math.inf
    if diverged_at is None and not math.isfinite(loss):
        diverged_at = settings.steps  # by the last update
    return model, {
        "held_out": loss if diverged_at is None else None,
        "diverged_at": diverged_at,
        "curves": curves,
        "heads": heads if heads["end"] else {},
        "noise_costs": noise_costs(model, settings, held_out) if diverged_at is None else None,
        "parameters": sum(p.numel() for p in model.parameters()),
        "cpu_s": round(time.process_time() - began, 3),
    }


def _fit(model: nn.Module, settings: TrainingSettings, probe: Data) -> tuple[dict[str, list[float]], int | None]:
    """Train; return curves at `points` steps, including the first and the last, and the step that was not finite."""
    data = _generator(settings, "data")
    parameters = list(model.parameters())
    optimizer = _optimizer(parameters)
    observed = {round(i * (settings.steps - 1) / max(1, settings.points - 1)) for i in range(settings.points)}
    curves: dict[str, list[float]] = {"step": []}
    since: list[float] = []
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            # A twentieth of the steps is warm-up, so short and long runs have schedules of one shape.
            group["lr"] = learning_rate(step, settings.steps, settings.rate, warm_up=max(1, settings.steps // 20))
        loss = _loss(model, settings, _batch(settings, settings.rows, data))
        since.append(loss.item())
        # Before the update: the weights are still those that gave the loss, and the curves end here.
        if not math.isfinite(since[-1]):
            return curves, step
        if step in observed:  # before the update, so that loss, gradients and logits belong to the same weights
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
    # Norms and biases are not decayed towards 0: a gain of 0 would switch its channel off.
    matrices = [p for p in parameters if p.ndim == 2]
    rest = [p for p in parameters if p.ndim != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], betas=(0.9, 0.95), fused=True)


def _generator(settings: TrainingSettings, what: str) -> torch.Generator:
    """Runs that differ in score, scale or rate get the same data, and equal initial weights where shapes agree."""
    return torch.Generator().manual_seed(stable_seed([what, settings.model, settings.seed]))


def _batch(settings: TrainingSettings, rows: int, generator: torch.Generator, held_out: bool = False) -> Data:
    if settings.model == "decoder":
        text = _text()[held_out]
        return batch(
            text[: settings.text_bytes] if settings.text_bytes and not held_out else text,
            rows,
            settings.length,
            generator,
        )
    return strings(rows, settings.length, generator)


def _held_out(settings: TrainingSettings) -> list[Data]:
    generator = torch.Generator().manual_seed(stable_seed(["held out", settings.model]))
    return [_batch(settings, HELD_OUT_ROWS, generator, held_out=True) for _ in range(HELD_OUT_BATCHES)]


def _autocast(settings: TrainingSettings) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16, enabled=settings.precision == "bfloat16")


def _forward(model: nn.Module, settings: TrainingSettings, data: Data, record: AuxOutputs | None = None) -> Tensor:
    inputs = data if settings.model == "encoder_decoder" else data[:1]
    with _autocast(settings):
        logits: Tensor = model(*inputs, record=record)
    return logits


def _loss(model: nn.Module, settings: TrainingSettings, data: Data) -> Tensor:
    return nn.functional.cross_entropy(_forward(model, settings, data).float().flatten(0, 1), data[1].flatten())


@torch.no_grad()
def _held_out_loss(model: nn.Module, settings: TrainingSettings, batches: list[Data]) -> float:
    return sum(_loss(model, settings, data).item() for data in batches) / len(batches)


NOISE_ON_INPUTS, NOISE_ON_WEIGHTS = 0.5, 0.2  # standard deviation, over that of what it is added to
NOISY_BATCHES = 4


@torch.no_grad()
def noise_costs(model: nn.Module, settings: TrainingSettings, batches: list[Data]) -> dict[str, float]:
    """Return what Gaussian noise adds to the held-out loss, in nats a symbol.

    Args:
        model: trained; the noise goes into the weights of a copy.
        settings: of its run.
        batches: held out; the first four are used, with and without noise.

    Returns:
        `inputs`: noise on every embedded symbol; `weights`: noise on every matrix.
    """
    # What else is measured on the model has to see it without noise: `train_heads` probes it after this.
    model = copy.deepcopy(model)
    generator, batches = _generator(settings, "noise"), batches[:NOISY_BATCHES]
    clean = _held_out_loss(model, settings, batches)

    def noise(values: Tensor, share: float) -> Tensor:
        return share * values.std() * torch.randn(values.shape, generator=generator)

    embed = model.get_submodule("embed")
    hook = embed.register_forward_hook(lambda _m, _a, out: out + noise(out, NOISE_ON_INPUTS))
    try:
        inputs = _held_out_loss(model, settings, batches)
    finally:
        hook.remove()
    for weight in model.parameters():
        if weight.ndim == 2:
            weight.add_(noise(weight, NOISE_ON_WEIGHTS))
    return {"inputs": inputs - clean, "weights": _held_out_loss(model, settings, batches) - clean}


def _heads(model: nn.Module, settings: TrainingSettings, held_out: list[Data]) -> list[dict[str, Any]]:
    if settings.heads == 1 or not isinstance(model, Decoder):
        return []
    return head_figures(model, held_out[0][0])


GRADIENT_QUANTILES = (0.1, 0.5, 0.9)


@torch.no_grad()
def logit_figures(forward: Callable[[AuxOutputs], Any]) -> dict[str, float]:
    """Return figures over every attention of a model, from a separate forward pass.

    Args:
        forward: runs the model with a record of its attentions.

    Returns:
        `max_logit` and `min_logit`, the largest and smallest over all rows; for rows that see two or more keys,
        `logit_std`, the root of the mean variance of a row, and `entropy_share`, the mean of the entropy over the
        logarithm of the number of keys.
    """
    record: AuxOutputs = []
    forward(record)
    largest, smallest, shares, variances = -math.inf, math.inf, [], []
    for rows in record:
        assert rows.max_logit is not None
        assert rows.min_logit is not None
        assert rows.entropy_nats is not None
        assert rows.variance is not None
        # A row with one key has entropy 0 of at most log 1 = 0: no share.
        several = rows.keys > 1  # type: ignore[operator]
        count = rows.keys[several]  # type: ignore[index]
        largest = max(largest, rows.max_logit.max().item())
        smallest = min(smallest, rows.min_logit.min().item())
        shares.append((rows.entropy_nats[several] / count.log()).mean().item())
        variances.append((rows.variance[several] * count / (count - 1)).mean().item())
    return {
        "max_logit": largest,
        "min_logit": smallest,
        "logit_std": math.sqrt(sum(variances) / len(variances)),
        "entropy_share": sum(shares) / len(shares),
    }


def query_gradients(model: nn.Module) -> dict[str, float]:
    """Return quantiles of |dL/dW_q| over the entries of all query projections: `gradient_p10`, `_p50`, `_p90`."""
    parts = []
    for part in model.modules():
        if isinstance(part, MultiHeadAttention):
            assert part.in_proj_weight is not None
            assert part.in_proj_weight.grad is not None
            # q comes first in the fused projection, then k and v.
            rows = part.num_heads * part.head_dim
            parts.append(part.in_proj_weight.grad[:rows].abs().flatten())
    values = torch.cat(parts).sort().values
    at = [round(quantile * (len(values) - 1)) for quantile in GRADIENT_QUANTILES]
    return {f"gradient_p{round(100 * q)}": values[i].item() for q, i in zip(GRADIENT_QUANTILES, at, strict=True)}


def attention_divergence(first: Tensor, second: Tensor) -> Tensor:
    """Jensen-Shannon divergence over log 2, from 0 to 1.

    Args:
        first: weights (..., S), each row sums to 1.
        second: weights (..., S).

    Returns:
        (...), in the dtype of the weights.

    Example:
        >>> one, other = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
        >>> [round(attention_divergence(one, second).item(), 4) for second in (one, 1 - one, other)]
        [0.0, 1.0, 0.3113]
    """
    middle = (first + second) / 2
    share: Tensor = _entropy(middle) - (_entropy(first) + _entropy(second)) / 2
    return (share / math.log(2)).clamp(0.0, 1.0)


def _entropy(weights: Tensor) -> Tensor:
    return -torch.xlogy(weights, weights).sum(-1)


def subspace_overlap(first: Tensor, second: Tensor) -> float:
    """Mean squared cosine of the principal angles between the row spaces of two matrices, from 0 to 1.

    Args:
        first: (d, D), of full rank, d <= D.
        second: (d, D).

    Example:
        >>> round(subspace_overlap(torch.eye(4)[:2], 3 * torch.eye(4)[1:3]), 6)
        0.5
    """
    one, other = (torch.linalg.qr(weight.double().mT)[0] for weight in (first, second))
    return float((one.mT @ other).square().sum()) / len(first)  # |Q1^T Q2|^2 is the sum of the squared cosines


@torch.no_grad()
def head_figures(model: nn.Module, text: Tensor) -> list[dict[str, float]]:
    """Return the differences of every pair of heads of every attention of a decoder.

    Args:
        model: a `Decoder`.
        text: bytes (B, L), held out.

    Returns:
        One entry per layer and pair: `layer`, `first`, `second`; `divergence`, the mean over all rows that see more
        than one key; `query_overlap` and `key_overlap` of the two projections.
    """
    inputs: list[Tensor] = []
    attentions = [part for part in model.modules() if isinstance(part, Attention)]
    hooks = [part.heads.register_forward_pre_hook(lambda _, args: inputs.append(args[0])) for part in attentions]
    try:
        model(text)
    finally:
        for hook in hooks:
            hook.remove()
    found: list[dict[str, float]] = []
    for layer, (part, inside) in enumerate(zip(attentions, inputs, strict=True)):
        heads = part.heads
        maps = heads(inside, inside, inside, is_causal=True, average_attn_weights=False)[1][:, :, 1:].double()
        query, key = (weight.view(heads.num_heads, -1, weight.shape[1]) for weight in weights_of(heads))
        for i, j in combinations(range(heads.num_heads), 2):
            values = {
                "divergence": attention_divergence(maps[:, i], maps[:, j]).mean().item(),
                "query_overlap": subspace_overlap(query[i], query[j]),
                "key_overlap": subspace_overlap(key[i], key[j]),
            }
            found.append({"layer": layer, "first": i, "second": j, **values})
    return found

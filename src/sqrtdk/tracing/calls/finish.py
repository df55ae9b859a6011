"""Turns a reading into a frozen record with formula, scale, masks and statistics."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sqrtdk.tracing.calls import formula, statistics
from sqrtdk.tracing.calls.blocks import scale_of_blocks, tell_blocks
from sqrtdk.tracing.calls.scale import tell_scale
from sqrtdk.tracing.calls.visible_keys import TokensOf, against_padding, combined_masks
from sqrtdk.tracing.readback.reading import Logits, Reading
from sqrtdk.tracing.readback.side import ProductSide
from sqrtdk.tracing.records import AttentionCall, Stage
from sqrtdk.tracing.steps import Bias, LearnedSinks, Power, Softcap, Step, scaled_by
from sqrtdk.tracing.tape import places
from sqrtdk.tracing.tensors import CallRows

_PROGRAMS = (torch.fx.GraphModule, torch.jit.ScriptModule)


class RowLimit(NamedTuple):
    """The largest number of rows of a sequence to measure, which are evenly spaced; None measures all."""

    max_rows: int | None


def call_of_reading(
    reading: Reading,
    module_class: str,
    *,
    measure_stats: bool,
    measure_slope: bool,
    tokens: TokensOf | None = None,
    rows: RowLimit | None = None,
) -> tuple[AttentionCall, CallRows | None]:
    """Return the record of a reading. Its `index` is set when the trace ends.

    Args:
        reading: The attention.
        module_class: Class name of the module at its site.
        measure_stats: Measure the statistics.
        measure_slope: Read the scale from the logits as well.
        tokens: Tells which rows and keys are not padding, if that is known.
        rows: Measure single rows instead of the statistics, the counts of the mask and the size of the output.

    Returns:
        The record, and the statistics of its rows if they were requested and could be measured.
    """
    visible_keys = combined_masks(reading, counts=rows is None)
    softmax_at = product_at = places.place_text(reading.place)  # a kernel has one place for both
    if reading.operands is None:
        product_at = None
    elif isinstance(reading.operands, Logits):
        product_at = places.place_text(reading.operands.product.place)
    if reading.without_data and visible_keys.mask is not None:
        # Without data, a mask on the weights can't be told from the one that the logits already have.
        reading = replace(reading, weight_steps=replace(reading.weight_steps, remasked=False))
    steps = tuple(replace(step, at=step.at or softmax_at) for step in visible_keys.steps)
    layout, query, key = reading.layout, reading.query, reading.key
    unknown = formula.unknown_of(reading)
    width = layout.width - max(query.padding, key.padding)
    blocks = tell_blocks(reading, width, measure_slope=measure_slope)
    if blocks and not unknown:
        scale = scale_of_blocks(blocks)
    else:
        whole, sample = reading.whole is not None, reading.sample
        by_sample = measure_slope and not blocks and sample is not None
        known = sample if sample is not None and by_sample else replace(reading, whole=None)
        measured = by_sample if whole else measure_slope and not blocks
        scale = tell_scale(known, steps, width, measure=measured, visible_keys=None if whole else visible_keys)
    no_stats = statistics.why_unmeasured(reading)
    stats = statistics.exact_statistics(reading, visible_keys) if no_stats is None and measure_stats else None
    by_row = (
        statistics.measure_rows(reading, visible_keys, rows.max_rows) if no_stats is None and rows is not None else None
    )
    biases = [(i, step) for i, step in enumerate(steps) if isinstance(step, Bias)]
    content = [step for _, step in biases if step.content]
    mixed_in = (scaled_by(steps, i) for i, step in biases if not step.content)
    self_attention = _same_source(query, key)
    padding_seen, tokens_hidden = against_padding(reading, visible_keys, tokens, self_attention)
    call = AttentionCall(
        site=reading.site,
        index=0,
        module_class=module_class,
        kind=reading.kind,
        op=reading.op,
        score=reading.score or _score(reading, content),
        batch=layout.batch,
        heads=layout.heads,
        kv_heads=_kv_heads(reading),
        head_dim=width,
        padded_head_dim=layout.width,
        value_dim=layout.value_width,
        model_dim=query.start.width,
        query_len=layout.rows,
        key_len=layout.columns,
        self_attention=self_attention,
        dtype=str(reading.dtype).removeprefix("torch."),
        logits_dtype=str(reading.logits_dtype).removeprefix("torch."),
        device=str(reading.device),
        stages=_stages(reading, steps, product_at),
        formula=formula.write_formula(reading, steps),
        scale=scale,
        terms=1 + sum(step.content for step in content),
        norm=query.norm or key.norm,
        norm_gain=query.norm_gain or key.norm_gain,
        rope=query.turned or key.turned,
        softcap=next((step.cap for step in steps if isinstance(step, Softcap) and not step.by_logits), None),
        bias=next((step.name for _, step in biases), None),
        bias_scaled_by=next((by for by in mixed_in if by is not None), None),
        mask=visible_keys.mask,
        sinks=any(isinstance(step, LearnedSinks) for step in steps),
        dropout=reading.dropout,
        future_weight=stats.future_weight if stats is not None else None,
        max_product=stats.max_product if stats is not None else None,
        output_rms=_root_mean_square(reading.output) if rows is None else None,
        unknown=unknown,
        faults=formula.faults_of(reading),
        stats=stats.heads if stats is not None else None,
        stats_reason=no_stats,
        shared_qk=_shared(reading, width),
        padding_seen=padding_seen,
        tokens_hidden=tokens_hidden,
        axis=reading.axis,
        product_at=product_at,
        softmax_at=softmax_at,
        blocks=blocks,
    )
    return call, by_row


def _score(reading: Reading, content: Sequence[Bias]) -> str:
    if reading.distance is not None:
        # torch.cdist(q, k) ** 2
        first = itertools.takewhile(lambda step: isinstance(step, Power), reading.steps)
        power = math.prod(step.exponent for step in first if isinstance(step, Power))
        return replace(reading.distance, power=reading.distance.power * power).name
    if content:
        return content[0].name
    # F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT is the cosine of q and k.
    return "cosine" if reading.query.norm == reading.key.norm == "l2" else "dot"


def _kv_heads(reading: Reading) -> int:
    # k.repeat_interleave(4, dim=1) makes the keys grow by 4: the model has a quarter as many key heads.
    heads = reading.kv_heads or reading.layout.heads
    growth = reading.key.growth
    return heads // growth if heads % growth == 0 else heads


def _same_source(query: ProductSide, key: ProductSide) -> bool | None:
    if query.root is None or key.root is None:
        return None
    if query.root is key.root:
        return True
    if query.start.source is None or key.start.source is None:
        return None
    return bool(query.start.lineage & key.start.lineage)


def _shared(reading: Reading, width: int) -> bool:
    """Return whether q and k are the same projection, not two parts of a fused one, which would be larger."""
    root, layout = reading.query.root, reading.layout
    if root is None or root is not reading.key.root:
        return False
    return math.prod(root.shape) == layout.batch * layout.heads * layout.rows * width


def _stages(reading: Reading, steps: Sequence[Step], product_at: str | None) -> tuple[Stage, ...]:
    weight_steps = reading.weight_steps
    met = Stage("logits", "product" if reading.distance is None else "distance", at=product_at)
    logits = (replace(stage, at=step.at) for step in steps if (stage := step.stage()) is not None)
    stages = [*reading.query.stages, *reading.key.stages, met, *logits]
    if weight_steps.remasked:
        stages.append(Stage("weights", "mask", "after the softmax"))
    if weight_steps.thinned:
        stages.append(Stage("weights", "thin", "by their own size"))
    stages += weight_steps.stages
    stages += [Stage("weights", "unknown", change.name) for change in weight_steps.changes]
    if weight_steps.renormalised:
        stages.append(Stage("weights", "normalise", "divided by their sum"))
    return tuple(stages)


def _root_mean_square(output: Tensor | None) -> float | None:
    """Return the root mean square of the output, or None without data."""
    if output is None or output.is_meta or not output.numel() or output.is_nested:
        return None
    return float(output.detach().to(torch.float32).square().mean().sqrt())


def site_in_program(reading: Reading, modules: Mapping[str, nn.Module]) -> str:
    """Return the path of the module that holds the projections of q and k if a program ran, else the recorded site.

    A program (an exported or symbolically traced graph, TorchScript) does not call its modules. The names of the
    weights that project q and k show where in the model an attention belongs.

    Args:
        reading: The attention.
        modules: Modules of the model, by path.
    """
    if not isinstance(modules.get(reading.site), _PROGRAMS):
        return reading.site
    pairs = zip(_holder(reading.query), _holder(reading.key), strict=False)
    shared = [left for left, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
    inside = reading.site.split(".") if reading.site else []
    # layers.0.attn.q and layers.0.attn.k share layers.0.attn; a path that is not a module is shortened.
    while shared and ".".join(shared) not in modules:
        shared.pop()
    return ".".join(shared) if shared[: len(inside)] == inside else reading.site


def _holder(side: ProductSide) -> list[str]:
    """Return the path around a projection: layers.0.attn for `layers.0.attn.q.weight` and `layers.0.attn.in_proj`."""
    path = side.root.label.split(".") if side.root is not None else [""]
    return path[:-2] if path[-1] == "weight" else path[:-1]

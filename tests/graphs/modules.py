"""Modules with known verdicts, exported to ONNX and to programs: the families, and the planted mistakes."""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sqrtdk.models.inputs import guess_inputs
from tests.attentions.planted import FACTOR, planted
from tests.hf.families import EAGER_ONLY, FAMILIES, build

# What torch's exporter to ONNX needs to be told, or can't write.
WITHOUT_FOLDING = ("detr",)  # it folds the first self-attention, of queries that are zeros, into a constant
WITHOUT_MASK = ("xlnet",)  # 1.0 - mask has no overload that it knows
NOT_WRITTEN = {"deepseek_v2": "its rotation is of complex numbers, which the exporter does not write"}


def family(name: str, folder: Path) -> tuple[nn.Module, Any]:
    """A family's model and inputs; its config is written to the folder."""
    torch.manual_seed(0)
    config = FAMILIES[name]()
    config.use_cache = False
    model = build(config, "eager" if name in EAGER_ONLY else "sdpa").eval()
    inputs, _ = guess_inputs(model, batch=2, seq_len=24, seed=0)
    config.save_pretrained(folder)
    return model, inputs


def mistaken(style: str, mistake: str | None, folder: Path) -> tuple[nn.Module, Any]:
    """A stack with a mistake and its inputs; what its config declares is written to the folder."""
    model, inputs = planted(style, mistake)
    if mistake == "length_factor":
        yarn = {"rope_type": "yarn", "factor": FACTOR, "mscale_all_dim": 1.0}
        (folder / "config.json").write_text(json.dumps({"rope_parameters": yarn}))
    return model, inputs


def exported(model: nn.Module, inputs: Any, path: Path, name: str = "", **options: Any) -> Path:
    """Write a module as the kind that the path's suffix says; whatever the exporters warn of is theirs."""
    args, kwargs = (inputs, {}) if isinstance(inputs, tuple) else ((), dict(inputs))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    choose: Any = getattr(model, "set_experts_implementation", None)
    if choose is not None and getattr(model.config, "_experts_implementation", None) is not None:
        choose("batched_mm")  # the default one is an operator of transformers' own
    if name in WITHOUT_MASK:
        kwargs.pop("attention_mask", None)
    loggers = [logging.getLogger(n) for n in ("torch.onnx", "torch.onnx._internal.exporter._registration")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            if path.suffix == ".pt2":
                torch.export.save(torch.export.export(model, args, kwargs, strict=False, **options), path)
            else:
                pytest.importorskip("onnxscript", reason="onnxscript is not installed: torch.onnx.export needs it")
                folds = name not in WITHOUT_FOLDING
                options |= {"verbose": False, "external_data": False, "optimize": folds}
                torch.onnx.export(model, args, path, kwargs=kwargs, dynamo=True, **options)
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
    return path

"""Makes the document of `sqrtdk params`: parameters of attention, of presets or of a model without weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from sqrtdk.errors import ModelError
from sqrtdk.messages import Message, joined
from sqrtdk.models.build import build_model
from sqrtdk.models.demo import load_demo
from sqrtdk.models.factory import call_factory
from sqrtdk.models.limits import check_seed
from sqrtdk.models.names import calls_factory, is_demo, locate
from sqrtdk.nn import attention_parts
from sqrtdk.theory.parameters import PRESETS, Terms

SCHEMA_VERSION = 1


def count_parameters(
    target: str | None = None, *, revision: str | None = None, trust_remote_code: bool = False, seed: int = 0
) -> dict[str, Any]:
    """Count the parameters of every attention, for each layer and in total.

    Args:
        target: A preset, a directory with config.json, a config, a hub id, `package.module:factory`, or demo; None
            takes all presets.
        revision: Branch, tag or commit of a hub id.
        trust_remote_code: Run the Python code that comes with the model.
        seed: Seed of the factory.

    Returns:
        The document that `sqrtdk params --json` prints.

    Raises:
        ModelError: The model can't be found or built, or holds no attention.
        InvalidValueError: torch lacks the seed.

    Example:
        >>> count_parameters("gpt2")["attention_parameters"]
        28348416
    """
    check_seed(seed)
    head: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "target": target}
    if target is None:
        return head | {"kind": "presets", "presets": [_preset(name) for name in PRESETS]}
    if target in PRESETS and not Path(target).is_dir():
        return head | {"kind": "preset", **_preset(target)}
    return head | {"kind": "model", **_model(target, revision, trust_remote_code, seed)}


def _preset(name: str) -> dict[str, Any]:
    """Return the parameters of a preset, as `--json` shows them."""
    preset = PRESETS[name]
    layers = [
        {
            "name": layers.name,
            "count": layers.count,
            "d_model": layers.d_model,
            "heads": layers.heads,
            "kv_heads": layers.kv_heads,
            "head_dim": layers.head_dim,
            "formula": layers.each.formula,
            "parameters_each": layers.each.total,
            "once": Terms(layers.once).formula if layers.once else None,
            "parameters_once": Terms(layers.once).total,
            "parameters": layers.total,
        }
        for layers in preset.layers
    ]
    return {
        "name": name,
        "source": preset.source,
        "attention_parameters": preset.attention,
        "parameters": preset.parameters,
        "layers": layers,
    }


def _model(target: str, revision: str | None, trust_remote_code: bool, seed: int) -> dict[str, Any]:
    """Return the parameters of every attention of a model, as `--json` shows them.

    Raises:
        ModelError: The model has no attention.
    """
    module, notes = _built(target, revision, trust_remote_code, seed)
    parts = attention_parts(module)
    if not parts:
        raise ModelError(
            Message("errors.model.no_attention_class", kind=type(module).__name__),
            hint=Message("errors.hint.check_finds"),
        )
    layers = [
        {
            "site": part.site,
            "class": part.cls,
            "formula": part.formula,
            "weights": {name: list(shape) for name, shape in part.weights},
            "parameters": part.parameters,
        }
        for part in parts
    ]
    return {
        "class": type(module).__name__,
        "attention_parameters": sum(part.parameters for part in parts),
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "notes": list(notes),
        "layers": layers,
    }


def _built(target: str, revision: str | None, trust_remote_code: bool, seed: int) -> tuple[nn.Module, tuple[str, ...]]:
    """Build the model on the meta device; a factory that can't run there builds it with weights."""
    if is_demo(target):
        return load_demo(target), ()
    if calls_factory(target):
        try:
            return call_factory(target, static=True, seed=seed)[0], ()
        except ModelError:
            return call_factory(target, seed=seed)[0], (Message("premises.weights.not_on_meta"),)
    try:
        _, home = locate(target, revision, weights=False, trust_remote_code=trust_remote_code)
    except ModelError as error:
        # A name without a slash may be meant for a preset.
        if "/" in target:
            raise
        raise ModelError(
            Message("errors.model.no_preset", target=repr(target), reason=error.message), hint=_either(error)
        ) from error
    module, _, notes = build_model(home, static=True, trust_remote_code=trust_remote_code)
    return module, notes


def _either(error: ModelError) -> Message:
    presets = joined([*PRESETS], "comma")
    if not error.hint:
        return Message("errors.hint.presets", names=presets)
    return Message("errors.hint.presets_or", names=presets, hint=error.hint)

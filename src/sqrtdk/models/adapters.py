"""Reads an adapter's directory, as PEFT writes it, and merges it into its base model: LoRA, rsLoRA, DoRA, IA3.

Only JSON and safetensors are read, and no code of the adapter or of PEFT runs. With W of a module (out, in), r the rank
and s the scale, which is alpha / r, or alpha / sqrt(r) with `use_rslora`:

    LoRA    W + s B A                                   `lora_A` (r, in), `lora_B` (out, r)
    DoRA    m (W + s B A) / |W + s B A|, row by row     `lora_magnitude_vector` m (out)
    IA3     W l, or with l on the inputs of a feed-forward layer       `ia3_l` (out, 1) or (1, in)

Modules that were trained whole (`modules_to_save`, biases) replace those of the base.

Reference:
    Hu et al. 2021, arXiv 2106.09685; Kalajdzievski 2023, arXiv 2312.03732; Liu et al. 2024, arXiv 2402.09353;
    Liu et al. 2022, arXiv 2205.05638.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk.errors import ModelError, short_text
from sqrtdk.messages import Message
from sqrtdk.models.checkpoint import CONFIG, PICKLES, how_to_convert
from sqrtdk.models.config import read_json
from sqrtdk.models.links import refuse_stray_files

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PEFT_PREFIX = "base_model.model."
# Settings under which a forward pass is not that of merged weights, or is built from code that a config names.
_NOT_MERGED = ("layer_replication", "target_parameters", "trainable_token_indices", "alora_invocation_tokens",
               "use_qalora", "use_bdlora", "megatron_config", "arrow_config")  # fmt: skip
_ADAPTER_PARTS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector", "ia3_l")


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """What an adapter does to one parameter of its base.

    Attributes:
        kind: "LoRA", "rsLoRA", "DoRA", "IA3"; "whole" for a tensor that replaces the base's.
        down: A, (r, in); of IA3 l, (out, 1) or (1, in); of "whole" the tensor.
        up: B, (out, r); None of other kinds than LoRA and DoRA.
        magnitude: m of DoRA, (out).
        scale: s.
        alpha: numerator of s; NaN if unknown.
        turned: the parameter lies (in, out), as in transformers' `Conv1D`.
    """

    kind: str
    down: Tensor
    up: Tensor | None = None
    magnitude: Tensor | None = None
    scale: float = 1.0
    alpha: float = math.nan
    turned: bool = False

    @property
    def rank(self) -> int:
        """Rank of the update; 0 for those that are no product of two matrices."""
        return 0 if self.up is None else self.down.shape[0]

    def product(self) -> Tensor:
        """Return B A, without the scale, as the parameter lies; float32."""
        assert self.up is not None
        product: Tensor = self.up.float() @ self.down.float()
        return product.mT if self.turned else product

    def applied(self, weight: Tensor, scale: float | None = None) -> Tensor:
        """Return the parameter with the update, in float32.

        Args:
            weight: The base's parameter.
            scale: Another s, for LoRA and DoRA.

        Example:
            >>> update = Update("LoRA", torch.ones(1, 3), torch.tensor([[1.0], [0.0]]), scale=2.0)
            >>> update.applied(torch.zeros(2, 3)).tolist()
            [[2.0, 2.0, 2.0], [0.0, 0.0, 0.0]]
        """
        if self.kind == "whole":
            return self.down.float()
        weight = weight.float()
        if self.kind == "IA3":
            times: Tensor = self.down.float().to(weight.device)
            return weight * (times.flatten() if weight.dim() == 1 else times.mT if self.turned else times)
        s = self.scale if scale is None else scale
        moved = weight + s * self.product().to(weight.device)
        if self.magnitude is None:
            return moved
        along = 0 if self.turned else 1
        times = (self.magnitude.float().to(weight.device) / moved.norm(dim=along)).unsqueeze(along)
        dora: Tensor = moved * times
        return dora


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter, and the parameters of its base that it changes.

    Attributes:
        name: Its directory, or the class of the module that holds it.
        updates: By the name of the parameter.
        before: The base's own parameters, by name.
        unknown: Names of tensors that belong to no module of the base.
    """

    name: str
    updates: Mapping[str, Update]
    before: Mapping[str, Tensor] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()


def is_adapter(directory: str | Path) -> bool:
    """Return whether a directory holds an adapter."""
    return os.path.isfile(Path(os.path.expanduser(directory)) / ADAPTER_CONFIG)


def base_of(directory: Path) -> Path:
    """Return the directory of an adapter's base model, which is never downloaded.

    It is the one that `base_model_name_or_path` names, or one of that name beside the adapter.

    Raises:
        ModelError: There is no such directory, or the config can't be read.
    """
    refuse_stray_files(directory)
    named = read_json(directory / ADAPTER_CONFIG).get("base_model_name_or_path")
    if isinstance(named, str) and 0 < len(named) < 4096 and "\0" not in named:
        last = Path(named).name
        places = (directory / named, directory.parent / named, Path(named), directory.parent / last, directory / last)
        for path in places:
            if last and (path / CONFIG).is_file() and not is_adapter(path):
                return path
    raise ModelError(
        Message("errors.adapters.no_base", directory=repr(str(directory)), base=repr(str(named)[:200])),
        hint=Message("errors.hint.adapter_base", name=repr(Path(str(named)).name[:100])),
    )


def read_adapter(directory: Path, module: nn.Module) -> Adapter:
    """Return the adapter of a directory, read for a base model.

    Raises:
        ModelError: It is of another kind, is pickled, can't be read, or fits no module of the base.
    """
    refuse_stray_files(directory)
    config = read_json(directory / ADAPTER_CONFIG)
    kind = config.get("peft_type")
    odd = [name for name in _NOT_MERGED if config.get(name)]
    if kind not in ("LORA", "IA3") or odd:
        what = str(kind)[:40] + (f", {odd[0]}" if odd else "")
        raise ModelError(Message("errors.adapters.kind", kind=what), hint=Message("errors.hint.merge_adapter"))
    tensors = _tensors(directory)
    modules = {name.removesuffix(".base_layer"): part for name, part in module.named_modules()}
    parts: dict[str, dict[str, Tensor]] = {}
    updates: dict[str, Update] = {}
    own = dict(module.named_parameters())
    unknown = []
    for key, tensor in tensors.items():
        named, part = _split(key)
        path = _in_base(named, modules if part in _ADAPTER_PARTS or part == "lora_B.bias" else own)
        if path is None:
            unknown.append(key)
        elif part == "whole":
            updates[path] = Update("whole", tensor)
        else:
            parts.setdefault(path, {})[part] = tensor
    for path, held in parts.items():
        updates |= _updates(path, modules[path], held, config)
    bad = [name for name, update in updates.items() if name not in own or not _fits(update, own[name])]
    if bad or not updates:
        first = bad[0] if bad else next(iter(tensors), "")
        raise ModelError(
            Message("errors.adapters.fits_not", directory=repr(str(directory)), name=repr(first[:200])),
            hint=Message("errors.hint.own_base"),
        )
    before = {name: own[name].detach().clone() for name in updates}
    return Adapter(str(directory), updates, before, tuple(unknown))


def merge_adapter(adapter: Adapter, module: nn.Module) -> None:
    """Put the parameters with the adapter into its base model."""
    with torch.no_grad():
        for name, update in adapter.updates.items():
            parameter = module.get_parameter(name)
            parameter.copy_(update.applied(adapter.before[name]))


def adapter_of(model: nn.Module) -> Adapter | None:
    """Return the adapter that a model of PEFT holds beside its own weights; None if it has none that is active.

    The scale is that of its config, and not that of its modules, which may differ.
    """
    configs, active = getattr(model, "peft_config", None), getattr(model, "active_adapter", None)
    if not isinstance(configs, dict) or not isinstance(active, str) or active not in configs:
        return None
    config = configs[active].to_dict()
    updates: dict[str, Update] = {}
    before: dict[str, Tensor] = {}
    for path, part in model.named_modules():
        layer = getattr(part, "base_layer", None)
        if layer is None or not hasattr(part, "active_adapters"):
            continue
        held = {}
        for name in _ADAPTER_PARTS:
            every = getattr(part, name, None)
            if every is not None and active in every:
                one = every[active]
                held[name] = (one if isinstance(one, Tensor) else one.weight).detach()
        inner = path.removeprefix(_PEFT_PREFIX)
        for name, update in _updates(inner, layer, held, config).items():
            updates[name] = update
            before[name] = layer.get_parameter(name.rpartition(".")[2]).detach().clone()
    return Adapter(type(model).__name__, updates, before) if updates else None


def _tensors(directory: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = directory / ADAPTER_WEIGHTS
    if not path.is_file():
        pickles = sorted(one.name for one in directory.iterdir() if one.name.endswith(PICKLES))
        if pickles:
            raise ModelError(Message("errors.weights.pickled", file=repr(pickles[0])), hint=how_to_convert(pickles[0]))
        raise ModelError(
            Message("errors.adapters.no_weights", directory=repr(str(directory)), file=repr(ADAPTER_WEIGHTS)),
            hint=Message("errors.hint.download_again"),
        )
    try:
        tensors: dict[str, Tensor] = load_file(path)
        return tensors
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(
            Message("errors.adapters.unreadable", file=repr(path.name), reason=short_text(error)),
            hint=Message("errors.hint.damaged_weights"),
        ) from error


def _split(key: str) -> tuple[str, str]:
    """Return the module and the part that a tensor of the file is: ("h.0.attn", "lora_A"), or ("lm_head.weight",
    "whole").
    """
    name = key.removeprefix(_PEFT_PREFIX)
    if name.endswith(".lora_B.bias"):
        return name.removesuffix(".lora_B.bias"), "lora_B.bias"
    for ending in (name.removesuffix(".weight"), name):
        path, _, last = ending.rpartition(".")
        if last in _ADAPTER_PARTS:
            return path, last
    return name.replace(".base_layer.", ".").replace(".modules_to_save.", "."), "whole"


def _in_base(path: str, known: Mapping[str, Any]) -> str | None:
    """Return the path in the base: as it is, or with or without the first part, as a model with or without a head."""
    inner = path.partition(".")[2]
    tried = (path, inner, *(f"{name}.{path}" for name in ("model", "transformer") if name))
    return next((one for one in tried if one and one in known), None)


def _updates(path: str, module: nn.Module, held: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Update]:
    turned = type(module).__name__ == "Conv1D"
    name = f"{path}.weight"
    if "ia3_l" in held:
        update = Update("IA3", held["ia3_l"], turned=turned)
        on_outputs = held["ia3_l"].shape[1] == 1 and getattr(module, "bias", None) is not None
        return {name: update} | ({f"{path}.bias": update} if on_outputs else {})
    of_table = "lora_embedding_A" in held
    down, up = (held.get(f"lora_embedding_{x}" if of_table else f"lora_{x}") for x in "AB")
    if down is None or up is None or down.dim() != 2 or up.dim() != 2 or "lora_B.bias" in held:
        return {name: Update("none", torch.empty(0))}
    rank, alpha = down.shape[0], _of_pattern(config, "alpha_pattern", path, config.get("lora_alpha"))
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else max(1, rank))
    magnitude = held.get("lora_magnitude_vector")
    kind = "DoRA" if magnitude is not None else "rsLoRA" if config.get("use_rslora") else "LoRA"
    one = Update(kind, down, up, None, scale, alpha, turned or of_table)
    return {name: one if magnitude is None else replace(one, magnitude=magnitude.flatten())}


def _of_pattern(config: Mapping[str, Any], field: str, path: str, default: Any) -> float:
    """Return a number of a config for one module. A pattern is the end of a path here, and no regular expression."""
    every = config.get(field) or {}
    found = [every[key] for key in every if path == key.strip("^$") or path.endswith(f".{key.strip('^$')}")]
    value = found[0] if found else default
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or (not found and any(set(key) & set("*+?[](){}|\\") for key in every))
    ):
        raise ModelError(
            Message("errors.adapters.alpha", name=field, path=repr(path[:200])),
            hint=Message("errors.hint.merge_adapter"),
        )
    return float(value)


def _fits(update: Update, weight: Tensor) -> bool:
    if update.kind == "none" or not weight.is_floating_point():
        return False
    if update.kind == "whole":
        return update.down.shape == weight.shape
    if update.up is not None:
        rows, columns = weight.shape[::-1] if update.turned else weight.shape
        sizes = update.up.shape[0] == rows and update.down.shape[1] == columns and update.up.shape[1] == update.rank
        return sizes and (update.magnitude is None or update.magnitude.numel() == rows)
    if weight.dim() == 1:
        return update.down.numel() == weight.numel()
    rows, columns = weight.shape[::-1] if update.turned else weight.shape
    return tuple(update.down.shape) in ((rows, 1), (1, columns))

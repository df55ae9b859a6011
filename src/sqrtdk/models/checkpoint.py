"""The files that make a model: its config, and safetensors weights or none."""

from __future__ import annotations

import json
from pathlib import Path

from sqrtdk.errors import ModelError, short_text

CONFIG = "config.json"
TORCH_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
PICKLES = (*TORCH_PICKLES, ".msgpack", ".h5")


def config_path(home: Path) -> Path:
    """Return the path of a model's config: in its directory, or `home` itself if that is a file."""
    return home if home.is_file() else home / CONFIG


def weight_files(directory: Path) -> list[str]:
    """Return the names of the model's safetensors files; empty if the directory has no weights.

    Raises:
        ModelError: The weights are only pickled, a file that the index names is missing or is not a safetensors file
            beside it, or the directory holds an adapter instead of a model.
    """
    names = sorted(path.name for path in directory.iterdir() if path.is_file())
    if "adapter_config.json" in names:
        raise ModelError(
            f"{str(directory)!r} holds an adapter, not a whole model",
            hint="Merge it into its base model first, or write a factory: package.module:factory.",
        )
    if "model.safetensors" in names:
        return ["model.safetensors"]
    if "model.safetensors.index.json" in names:
        shards = _index_shards(directory / "model.safetensors.index.json")
        missing = [shard for shard in shards if shard not in names]
        if missing:
            raise ModelError(
                f"{len(missing)} of {len(shards)} weight files are missing, first {missing[0]!r}",
                hint="Download the model again, or pass --static to audit it without weights.",
            )
        return shards
    pickles = [name for name in names if name.endswith(PICKLES)]
    if pickles:
        raise ModelError(
            f"the weights are pickled ({pickles[0]!r}): loading a pickle runs the code inside it",
            hint=how_to_convert(pickles[0]),
        )
    stray = [name for name in names if name.endswith((".safetensors", ".gguf"))]
    if stray:
        raise ModelError(
            f"{stray[0]!r} is not a name under which transformers saves a model's weights",
            hint="Name it model.safetensors if it holds the whole model, or pass --static.",
        )
    return []


def how_to_convert(name: str) -> str:
    """Return what to do about pickled weights: three lines of Python if torch wrote them.

    Args:
        name: Name of the file.
    """
    if not name.endswith(TORCH_PICKLES):
        return "Convert them to safetensors, or pass --static to audit the config without weights."
    return (
        "Convert them if you trust where they come from, or pass --static to audit the config without weights:\n"
        "import torch; from safetensors.torch import save_file\n"
        f"weights = torch.load({name!r}, weights_only=True)\n"
        "save_file({name: w.clone() for name, w in weights.items()}, 'model.safetensors', metadata={'format': 'pt'})"
    )


def _index_shards(path: Path) -> list[str]:
    try:
        if path.stat().st_size > 100 * 2**20:
            raise ValueError("over 100 MiB")
        shards = sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"{path.name} is not a valid index of weight files: {short_text(error)}", hint="Download the model again."
        ) from error
    for shard in shards:
        # A path would lead out of the directory: {"lm_head.weight": "../../secrets.safetensors"}.
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ModelError(
                f"the index names {str(shard)[:100]!r}, which is no safetensors file beside it",
                hint="Only safetensors beside the index are read: anything else may run code.",
            )
    return shards

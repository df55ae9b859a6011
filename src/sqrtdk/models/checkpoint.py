"""The files that make a model: its config, and safetensors weights or none."""

from __future__ import annotations

import json
from pathlib import Path

from sqrtdk.errors import ModelError, short_text
from sqrtdk.messages import Message

CONFIG = "config.json"
TORCH_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
PICKLES = (*TORCH_PICKLES, ".msgpack", ".h5")


def config_path(home: Path) -> Path:
    """Return the path of a model's config: `config.json` in its directory, or `home` itself if that is a file."""
    return home if home.is_file() else home / CONFIG


def weight_files(directory: Path, *, quantised: bool = False) -> list[str]:
    """Return the names of the model's safetensors files; empty if the directory has no weights.

    Args:
        directory: The model's directory.
        quantised: Whether its config says that a library quantised it.

    Raises:
        ModelError: The weights are only pickled, a file that the index names is missing or is not a safetensors file
            beside it, or the directory holds an adapter instead of a model.
    """
    names = sorted(path.name for path in directory.iterdir() if path.is_file())
    if "adapter_config.json" in names:
        raise ModelError(
            Message("errors.weights.adapter", directory=repr(str(directory))),
            hint=Message("errors.hint.merge_adapter"),
        )
    if "model.safetensors" in names:
        return ["model.safetensors"]
    if "model.safetensors.index.json" in names:
        shards = _index_shards(directory / "model.safetensors.index.json")
        missing = [shard for shard in shards if shard not in names]
        if missing:
            raise ModelError(
                Message(
                    "errors.weights.missing_files", missing=len(missing), total=len(shards), first=repr(missing[0])
                ),
                hint=Message("errors.hint.download_or_static"),
            )
        return shards
    pickles = [name for name in names if name.endswith(PICKLES)]
    if pickles:
        raise ModelError(
            Message("errors.weights.pickled", file=repr(pickles[0])),
            hint=Message("errors.hint.pickled_quantised")
            if quantised or "qmodel.pt" in names
            else how_to_convert(pickles[0]),  # HQQ writes qmodel.pt
        )
    stray = [name for name in names if name.endswith((".safetensors", ".gguf"))]
    if stray:
        raise ModelError(
            Message("errors.weights.stray", file=repr(stray[0])),
            hint=Message("errors.hint.name_weights"),
        )
    return []


def how_to_convert(name: str) -> Message:
    """Return what to do about pickled weights: three lines of Python if torch wrote them.

    Args:
        name: Name of the file.
    """
    if not name.endswith(TORCH_PICKLES):
        return Message("errors.hint.convert")
    return Message("errors.hint.convert_with_torch", name=repr(name))


def _index_shards(path: Path) -> list[str]:
    """Return the names of the files in an index of shards.

    Raises:
        ModelError: The index can't be read, or names a file outside its directory.
    """
    try:
        if path.stat().st_size > 100 * 2**20:
            raise ValueError("over 100 MiB")
        shards = sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(
            Message("errors.weights.index", name=path.name, reason=short_text(error)),
            hint=Message("errors.hint.download_again"),
        ) from error
    for shard in shards:
        # A path would lead out of the directory: {"lm_head.weight": "../../secrets.safetensors"}.
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ModelError(
                Message("errors.weights.outside_index", shard=repr(str(shard)[:100])),
                hint=Message("errors.hint.only_safetensors"),
            )
    return shards

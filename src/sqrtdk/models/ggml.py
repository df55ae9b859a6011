"""Loads a GGUF file, which llama.cpp runs, or the dump of one of its runs, as a model with token ids."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk.errors import INTERRUPTS, InvalidValueError, ModelError, SqrtdkError, kind_and_text
from sqrtdk.messages import Message
from sqrtdk.models.input_file import read_tensors
from sqrtdk.models.names import ggml_kind
from sqrtdk.models.options import LoadOptions
from sqrtdk.models.records import Inputs, LoadedModel

_FLASH_OF_ATTN = {None: None, "eager": False, "sdpa": True}  # --attn: whether attention is ggml's one operation
_NOT_HERE = ("text", "dtype", "device_map", "offload_folder", "revision")


def load_ggml(model: str, options: LoadOptions, inputs: Inputs | None = None) -> LoadedModel:
    """Return a .gguf file, run by llama.cpp, or a .ggmldump file, as a model.

    Args:
        model: Path of the file.
        options: `attn` "sdpa" means flash attention, "eager" attention without it; of the others those on inputs count.
        inputs: Inputs to take token ids from; None for those of the options, of the dump, or made ones.

    Raises:
        MissingExtraError: llama-cpp-python is not installed.
        ModelError: The file can't be read or run; see `sqrtdk.frontends.from_gguf`.
        InvalidValueError: An option does not apply to such a file.
    """
    from sqrtdk.frontends.ggml.dump import read_dump
    from sqrtdk.frontends.ggml.front import GgmlSource, ggml_module, ids_of, made_ids
    from sqrtdk.frontends.ggml.llama import LlamaFile

    refused = [name for name in _NOT_HERE if getattr(options, name) is not None]
    if options.static:
        refused.append("static")
    if refused or options.device not in (None, "cpu"):
        name = (refused or ["device"])[0].replace("_", "-")
        raise InvalidValueError(
            Message("errors.options.of_ggml", name=name, model=repr(model)), hint=Message("errors.hint.of_ggml")
        )
    if not Path(model).is_file():
        raise ModelError(Message("errors.files.no_file", model=repr(model)), hint=Message("errors.hint.graph_path"))
    given = dict(read_tensors(options.input_file)) if inputs is None and options.input_file is not None else inputs
    ids = None if given is None else _ids(given)
    made = ids is None
    if ggml_kind(model) == ".ggmldump":
        run = read_dump(model)
        source, made = GgmlSource(run), False
        ids = ids_of(run) if ids is None else ids
    else:
        source = GgmlSource(LlamaFile(model, _FLASH_OF_ATTN[options.attn]))
        if ids is None:
            ids = made_ids(source.vocabulary, options.rows, options.seq_len, options.seed)
    try:
        module: nn.Module = ggml_module(source, ids)
    except (*INTERRUPTS, SqrtdkError):
        raise
    except Exception as error:
        if ggml_kind(model) != ".ggmldump":
            raise
        # sizes in a dump that do not fit each other raise whatever torch and numpy raise
        raise ModelError(
            Message("frontends.odd_dump", path=repr(model), reason=kind_and_text(error)),
            hint=Message("frontends.hint.dump"),
        ) from error
    loaded = LoadedModel(module, {"input_ids": ids}, id=model, kind="gguf", config=getattr(module, "config", None))
    return replace(loaded, made=made and options.seq_len is None)


def dump_ids(model: str) -> dict[str, Tensor]:
    """Return the inputs of a dump: its token ids.

    Raises:
        ModelError: It can't be read, or has none.
    """
    from sqrtdk.frontends.ggml.dump import read_dump
    from sqrtdk.frontends.ggml.front import ids_of

    return {"input_ids": ids_of(read_dump(model))}


def _ids(inputs: Inputs) -> Tensor:
    """Return the token ids among inputs of another model: `input_ids`, or else the first whole numbers of two axes.

    Raises:
        InvalidValueError: There are none.
    """
    values: list[Any] = [*inputs.values()] if isinstance(inputs, dict) else [*inputs]
    if isinstance(inputs, dict) and "input_ids" in inputs:
        values = [inputs["input_ids"], *values]
    for value in values:
        if isinstance(value, Tensor) and value.dim() == 2 and value.dtype in (torch.int32, torch.int64):
            return value.long()
    raise InvalidValueError(Message("errors.inputs.no_ids"), hint=Message("frontends.hint.ids"))

"""Reads inputs from a file: `--input FILE.safetensors`, with tensors named like the arguments of forward."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk import _files
from sqrtdk.errors import INTERRUPTS, ModelError, short_text
from sqrtdk.messages import Message, joined
from sqrtdk.models.limits import check_file
from sqrtdk.models.makers import vocabulary
from sqrtdk.models.modules import forward_arguments

MAX_INPUT_FILE_BYTES = 2**31
RANKS = {"input_ids": (2,), "decoder_input_ids": (2,), "pixel_values": (4, 5), "input_features": (2, 3, 4)}


def read_inputs(path: str | Path, module: nn.Module, config: Any = None) -> dict[str, Tensor]:
    """Read a safetensors file and check it against the model's forward.

    Args:
        path: The file.
        module: The model that will take the tensors.
        config: Its Hugging Face config, or None, which skips the check of ids against the vocabulary.

    Raises:
        ModelError: The file is missing, not regular, over 2 GiB, or not safetensors; or a name is unknown or missing, a
            rank is wrong, or ids are out of range.
    """
    tensors = read_tensors(path)
    check_input_names(tensors, module)
    for name, tensor in tensors.items():
        _check_tensor(name, tensor, config)
    return tensors


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """Read a safetensors file without checking its tensors against a model.

    Raises:
        ModelError: The file is missing, not regular, over 2 GiB, or not safetensors.
    """
    from safetensors.torch import load_file

    if Path(path).suffix != ".safetensors":
        raise ModelError(
            Message("errors.inputs.format", path=repr(str(path))),
            hint=Message("errors.hint.save_inputs"),
        )
    try:
        check_file(path, f"the inputs {str(path)!r}", MAX_INPUT_FILE_BYTES)
        tensors: dict[str, Tensor] = load_file(str(path))
    except (*INTERRUPTS, ModelError):
        raise
    except OSError as error:
        raise ModelError(
            Message("errors.inputs.unreadable", path=repr(str(path)), reason=_files.os_reason(error)),
            hint=Message("errors.hint.check_path"),
        ) from error
    except BaseException as error:  # safetensors has its own error type, and a panic in Rust is not an Exception
        raise ModelError(
            Message("errors.inputs.invalid", path=repr(str(path)), reason=short_text(error)),
            hint=Message("errors.hint.save_again"),
        ) from error
    return tensors


def check_input_names(tensors: dict[str, Tensor], module: nn.Module) -> None:
    """Check that tensors can be passed to `module.forward` by their names, and that no required one is missing.

    Raises:
        ModelError: A name is unknown, or an argument without a default or the model's main input is missing. The
            message or hint lists the names that are accepted.
    """
    accepted = forward_arguments(module)
    listed = Message("errors.hint.forward_takes", names=joined([*accepted], "comma") if accepted else "")
    kinds = {p.kind for p in inspect.signature(module.forward).parameters.values()}
    is_open = not accepted and inspect.Parameter.VAR_KEYWORD in kinds  # forward(**kwargs)
    unknown = [name for name in tensors if name not in accepted]
    if unknown and not is_open:
        raise ModelError(
            Message("errors.inputs.unknown", kind=type(module).__name__, name=repr(unknown[0][:100])), hint=listed
        )
    missing = [name for name, needed in accepted.items() if needed and name not in tensors]
    # transformers' forwards declare all arguments optional, and raise without their main one.
    main = getattr(module, "main_input_name", None)
    if main in accepted and not {main, "inputs_embeds", "encoder_outputs"} & set(tensors):
        missing.append(main)
    if missing:
        raise ModelError(Message("errors.inputs.lack", names=joined([*dict.fromkeys(missing)], "comma")), hint=listed)


def _check_tensor(name: str, tensor: Tensor, config: Any) -> None:
    """Check one input from a file.

    Raises:
        ModelError: It has a wrong shape, is empty, or has ids that the model does not know.
    """
    ranks = RANKS.get(name, ())
    if ranks and tensor.ndim not in ranks:
        wanted = " or ".join(str(rank) for rank in ranks)
        raise ModelError(
            Message("errors.inputs.shape", name=name, shape=str(tuple(tensor.shape)), wanted=wanted),
            hint=Message("errors.hint.batch_first"),
        )
    if tensor.numel() == 0:
        raise ModelError(
            Message("errors.inputs.empty", name=name, shape=str(tuple(tensor.shape))),
            hint=Message("errors.hint.one_row"),
        )
    if not name.endswith("input_ids"):
        return
    if tensor.dtype not in (torch.int64, torch.int32):
        raise ModelError(
            Message("errors.inputs.ids_dtype", name=name, dtype=str(tensor.dtype)),
            hint=Message("errors.hint.as_integers"),
        )
    if config is not None:
        vocab, low, high = vocabulary(config), int(tensor.min()), int(tensor.max())
        if low < 0 or high >= vocab:
            raise ModelError(
                Message("errors.inputs.ids_range", name=name, low=low, high=high, last=vocab - 1),
                hint=Message("errors.hint.own_tokenizer"),
            )

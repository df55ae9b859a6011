"""Inputs of the right kind for a model: ids, pixels, audio features, and what its decoder needs."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk.errors import InvalidValueError, ModelError
from sqrtdk.models.config import text_config
from sqrtdk.models.demo import CONTEXT, DemoModel
from sqrtdk.models.limits import check_elements, check_seed, check_sizes
from sqrtdk.models.records import Inputs
from sqrtdk.models.tokens import byte_ids, embedded_text, random_ids, read_text, text_ids

DEFAULT_SEQ_LEN = 128
DEFAULT_IMAGE_SIZE = 224
IMAGE_TOKENS = ("image_token_id", "image_token_index", "image_token")
VIDEO_TYPES = ("videomae", "timesformer", "vivit")


@dataclass(frozen=True, slots=True)
class Request:
    """What an input is made from; `text` is None where the user gave none."""

    module: nn.Module
    config: Any
    batch: int
    seq_len: int
    seed: int
    directory: Path | None
    text: str | None
    notes: list[str]


def make_inputs(
    module: nn.Module,
    config: Any,
    *,
    batch: int = 1,
    seq_len: int | None = None,
    seed: int = 0,
    text: str | Path | None = None,
    directory: Path | None = None,
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Make inputs for a Hugging Face model from its config and the signature of its forward, on the CPU.

    Args:
        module: The model; its `forward` says which inputs it takes.
        config: Its config.
        batch: Rows.
        seq_len: Tokens a row, at most what the model has positions for; None is 128 or that limit.
        seed: For random ids, pixels and audio.
        text: A UTF-8 file for the tokenizer; None takes the embedded text, or random ids without a tokenizer.
        directory: Where the tokenizer's files lie.

    Returns:
        Inputs by the names of forward's arguments, and notes.

    Raises:
        InvalidValueError: `batch` or `seq_len` below 1, an input of more than `MAX_ELEMENTS`, a seed that torch lacks.
        ModelError: The model wants an input that can't be made here, or `text` can't be used.
    """
    check_seed(seed)
    length, notes = _length(batch, seq_len, position_limit(module, config))
    request = Request(module, config, batch, length, seed, directory, read_text(text) if text else None, notes)
    accepted = forward_arguments(module)
    wanted = [name for name in MAKERS if name in accepted and _wants(name, request, accepted)]
    if any(p.is_meta for p in module.parameters()) and not hasattr(module, "hf_device_map"):
        # a mask of ones hides nothing, and a model can't see that on meta
        wanted = [name for name in wanted if not name.endswith("_mask") or accepted[name]]
    inputs: dict[str, Any] = {}
    for name in wanted:
        inputs[name] = MAKERS[name](request)
    missing = [name for name, needed in accepted.items() if needed and name not in inputs]
    if missing or not inputs:
        raise ModelError(
            f"{type(module).__name__} wants {', '.join(missing) or 'inputs'} that can't be made here",
            hint=f"Pass --input FILE.safetensors with tensors named as in forward({', '.join(list(accepted)[:8])}).",
        )
    if request.text is not None and "input_ids" not in inputs:
        raise ModelError(f"{type(module).__name__} takes no text", hint="Leave --text out, or pass --input.")
    return inputs, tuple(notes)


def guess_inputs(
    module: nn.Module, *, batch: int = 1, seq_len: int | None = None, seed: int = 0
) -> tuple[Inputs, tuple[str, ...]]:
    """Make inputs for a module of the Python API that came without any.

    Returns:
        Inputs on the module's device, and notes.

    Raises:
        InvalidValueError: The module has no Hugging Face config to make inputs from; or see `make_inputs`.
        ModelError: See `make_inputs`.

    Example:
        >>> guess_inputs(nn.Linear(4, 4))
        Traceback (most recent call last):
        sqrtdk.errors.InvalidValueError: no inputs were given, and Linear has no config to make them from
    """
    if isinstance(module, DemoModel):
        made, notes = demo_inputs(batch=batch, seq_len=seq_len)
        return place(made, module), notes
    config = getattr(module, "config", None)
    if config is None or not hasattr(config, "model_type"):
        accepted = ", ".join(forward_arguments(module)) or "*args, **kwargs"
        raise InvalidValueError(
            f"no inputs were given, and {type(module).__name__} has no config to make them from",
            hint=f"Pass inputs=(...) or inputs={{...}} for forward({accepted}); a factory may return (module, inputs).",
        )
    made, notes = make_inputs(module, config, batch=batch, seq_len=seq_len, seed=seed)
    return place(made, module), notes


def demo_inputs(
    *, batch: int = 1, seq_len: int | None = None, text: str | Path | None = None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Make inputs for the embedded model: bytes of a UTF-8 file, or of the embedded text.

    Raises:
        InvalidValueError: See `make_inputs`.
        ModelError: `text` can't be used.
    """
    length, notes = _length(batch, seq_len, CONTEXT)
    check_elements("input_ids", (batch, length))
    wanted = read_text(text) if text is not None else embedded_text()
    return {"input_ids": byte_ids(wanted, batch=batch, length=length)}, tuple(notes)


def _length(batch: int, seq_len: int | None, limit: int | None) -> tuple[int, list[str]]:
    """Tokens a row, at most `limit`, and a note where that cut what was asked for."""
    check_sizes(batch, seq_len)
    length = seq_len if seq_len is not None else min(DEFAULT_SEQ_LEN, limit or DEFAULT_SEQ_LEN)
    if limit is None or length <= limit:
        return length, []
    return limit, [f"seq_len {length} was cut to {limit}: the model has no more positions"]


def place(inputs: Inputs, module: nn.Module) -> Inputs:
    """Move tensors to the module's device, and floating ones to its dtype."""
    first = next((p for p in module.parameters() if p.is_floating_point()), None)
    if first is None:
        return inputs
    # accelerate keeps offloaded weights on meta and says by a hook where it computes
    device = getattr(getattr(module, "_hf_hook", None), "execution_device", None) or first.device

    def move(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(device, first.dtype) if value.is_floating_point() else value.to(device)

    if isinstance(inputs, dict):
        return {name: move(value) for name, value in inputs.items()}
    return tuple(move(value) for value in inputs)


def forward_arguments(module: nn.Module) -> dict[str, bool]:
    """Named arguments of `module.forward`, and whether each must be given."""
    parameters = inspect.signature(module.forward).parameters.values()
    return {p.name: p.default is p.empty for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def position_limit(module: nn.Module, config: Any) -> int | None:
    """Largest number of tokens that the model has positions for, or None where it names none."""
    part = text_config(config)
    names = ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len")
    found = [getattr(part, name, None) for name in names]
    limits = [value for value in found if isinstance(value, int) and not isinstance(value, bool) and value > 0]
    for name, child in module.named_modules():  # RoBERTa's table starts behind its padding index
        if name.endswith("position_embeddings") and isinstance(child, nn.Embedding) and child.padding_idx is not None:
            limits.append(child.num_embeddings - child.padding_idx - 1)
    return min(limits) if limits else None


def vocabulary(config: Any) -> int:
    """Number of ids that the model's text part knows.

    Raises:
        ModelError: The config names none.
    """
    for part in (text_config(config), config, getattr(config, "decoder", None)):
        size = getattr(part, "vocab_size", None)
        if isinstance(size, int) and size > 0:
            return size
    raise ModelError("the config names no vocab_size, so ids can't be drawn", hint="Pass --input FILE.safetensors.")


def _wants(name: str, request: Request, accepted: dict[str, bool]) -> bool:
    """Whether an optional argument should be given, for a model that accepts it."""
    main = getattr(request.module, "main_input_name", "input_ids")
    if accepted[name] or name == main:
        return True
    if name in ("input_ids", "attention_mask"):
        return main == "input_ids" or (name == "input_ids" and hasattr(request.config, "text_config"))
    if name == "decoder_input_ids":
        return bool(getattr(request.config, "is_encoder_decoder", False))
    if name in ("pixel_values", "input_features", "input_values"):
        if any(hasattr(request.config, token) for token in IMAGE_TOKENS) or hasattr(request.config, "audio_token_id"):
            request.notes.append(f"no {name}: the model's own processor must place their tokens; only text was run")
            return False
        return hasattr(request.config, "vision_config" if name == "pixel_values" else "audio_config")
    return name == "pixel_mask" and "pixel_values" in accepted


def _ids(request: Request, salt: int = 0) -> Tensor:
    check_elements("input_ids", (request.batch, request.seq_len))
    vocab = vocabulary(request.config)
    wanted = request.text if request.text is not None else embedded_text()
    ids, reason = text_ids(request.directory, wanted, batch=request.batch, length=request.seq_len, vocab=vocab)
    if ids is not None:
        return ids
    if request.text is not None:
        raise ModelError(f"--text can't be used: {reason}", hint="Leave it out: random ids are used then.")
    if salt == 0:
        request.notes.append(f"the ids are random, with seed {request.seed}: {reason}")
    part, seed = text_config(request.config), (request.seed + salt) % 2**64
    return random_ids(part, batch=request.batch, length=request.seq_len, vocab=vocab, seed=seed)


def _mask(request: Request) -> Tensor:
    check_elements("attention_mask", (request.batch, request.seq_len))
    return torch.ones(request.batch, request.seq_len, dtype=torch.long)


def _pixels(request: Request) -> Tensor:
    height, width = _image_size(request.config)
    channels = _first(request.config, "num_channels", 3)
    frames = [_first(request.config, "num_frames", 8)] if request.config.model_type in VIDEO_TYPES else []
    return _normal("pixel_values", request, (request.batch, *frames, channels, height, width))


def _pixel_mask(request: Request) -> Tensor:
    shape = (request.batch, *_image_size(request.config))
    check_elements("pixel_mask", shape)
    return torch.ones(shape, dtype=torch.long)


def _features(request: Request) -> Tensor:
    """Spectrograms: Whisper's (B, mel, 2 x positions), as a convolution halves the time; others (B, T, mel)."""
    positions, mel = _first(request.config, "max_source_positions", 0), _first(request.config, "num_mel_bins", 0)
    if positions and mel:
        return _normal("input_features", request, (request.batch, mel, 2 * positions))
    for name in ("feature_projection_input_dim", "input_feat_per_channel", "input_dim"):
        if width := _first(request.config, name, 0):
            return _normal("input_features", request, (request.batch, 256, width))
    raise ModelError("the config does not say the shape of input_features", hint="Pass --input FILE.safetensors.")


def _values(request: Request) -> Tensor:
    """Waveforms (B, samples) long enough for about 50 frames, or spectrograms (B, T, mel) where the config has bins."""
    stride = _first(request.config, "conv_stride", None)
    if stride is not None:
        return _normal("input_values", request, (request.batch, 50 * math.prod(stride) + 400))
    length, mel = _first(request.config, "max_length", 1024), _first(request.config, "num_mel_bins", 0)
    if mel:
        return _normal("input_values", request, (request.batch, length, mel))
    return _normal("input_values", request, (request.batch, 16000))


def _normal(name: str, request: Request, shape: tuple[int, ...]) -> Tensor:
    check_elements(name, shape)
    return torch.randn(shape, generator=torch.Generator().manual_seed(request.seed))


def _first(config: Any, name: str, default: Any) -> Any:
    """A field of the config or of one of its towers."""
    for part in (config, *(getattr(config, n, None) for n in ("vision_config", "audio_config", "backbone_config"))):
        value = getattr(part, name, None)
        if value is not None:
            return value
    return default


def _image_size(config: Any) -> tuple[int, int]:
    size = _first(config, "image_size", DEFAULT_IMAGE_SIZE)
    if isinstance(size, int):
        return size, size
    height, width = size if isinstance(size, (list, tuple)) else (size["height"], size["width"])
    return int(height), int(width)


MAKERS: dict[str, Callable[[Request], Tensor]] = {
    "input_ids": _ids,
    "pixel_values": _pixels,
    "pixel_mask": _pixel_mask,
    "input_features": _features,
    "input_values": _values,
    "attention_mask": _mask,
    "decoder_input_ids": lambda request: _ids(request, salt=1),
}

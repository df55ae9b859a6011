"""One maker for each argument of forward whose shape and values a config determines."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk.errors import ModelError
from sqrtdk.messages import Message
from sqrtdk.models.config import text_config
from sqrtdk.models.limits import check_elements
from sqrtdk.models.modules import file_hint, forward_arguments
from sqrtdk.models.tokens import embedded_text, random_ids, text_ids

DEFAULT_IMAGE_SIZE = 224
TOWERS = ("vision_config", "image_config", "audio_config", "backbone_config")
VIDEO_TYPES = ("videomae", "timesformer", "vivit")


@dataclass(frozen=True, slots=True)
class InputRequest:
    """What the inputs of a model are made from.

    Attributes:
        module: the model.
        config: its Hugging Face config.
        batch: number of rows.
        seq_len: number of tokens of a row.
        seed: of random numbers.
        directory: of the model, with its tokenizer; None if there is none.
        text: that the user gave; None: ids are random.
        notes: on what was decided for the user; makers add to it.
    """

    module: nn.Module
    config: Any
    batch: int
    seq_len: int
    seed: int
    directory: Path | None
    text: str | None
    notes: list[str]


def vocabulary(config: Any, hint: str | None = None) -> int:
    """Return the vocabulary size of a model's text part, `vocab_size` of its config.

    Args:
        config: The config, whose text sub-config comes first and whose `decoder` comes last.
        hint: The hint of the error; None for the usual one.

    Raises:
        ModelError: The config names no vocabulary size.
    """
    for part in (text_config(config), config, getattr(config, "decoder", None)):
        size = getattr(part, "vocab_size", None)
        if isinstance(size, int) and size > 0:
            return size
    raise ModelError(Message("errors.inputs.no_vocabulary"), hint=hint or Message("errors.hint.pass_input_file"))


def _ids(request: InputRequest, salt: int = 0) -> Tensor:
    check_elements("input_ids", (request.batch, request.seq_len))
    vocab = vocabulary(request.config, file_hint(request.module))
    wanted = request.text if request.text is not None else embedded_text()
    ids, reason = text_ids(request.directory, wanted, batch=request.batch, length=request.seq_len, vocab=vocab)
    if ids is not None:
        _note(request, reason)
        return ids
    if request.text is not None:
        raise ModelError(Message("errors.options.text", reason=reason), hint=Message("errors.hint.random_ids"))
    _note(request, Message("premises.inputs.random_ids", seed=request.seed, why=reason))
    part, seed = text_config(request.config), (request.seed + salt) % 2**64
    return random_ids(part, batch=request.batch, length=request.seq_len, vocab=vocab, seed=seed)


def _note(request: InputRequest, text: str) -> None:
    if text and text not in request.notes:
        request.notes.append(text)


def _mask(request: InputRequest) -> Tensor:
    check_elements("attention_mask", (request.batch, request.seq_len))
    return torch.ones(request.batch, request.seq_len, dtype=torch.long)


def _types(request: InputRequest) -> Tensor:
    """Return zeros, as a processor does for a prompt of text."""
    return torch.zeros_like(_mask(request))


def _pixels(request: InputRequest) -> Tensor:
    channels = _first(request.config, "num_channels", 3)
    if _is_patched(request):
        side = _first(request.config, "patch_size", 16)
        return _normal("pixel_values", request, (request.batch, _grid(request) ** 2, channels * side * side))
    height, width = _image_size(request.config)
    frames = [_first(request.config, "num_frames", 8)] if request.config.model_type in VIDEO_TYPES else []
    return _normal("pixel_values", request, (request.batch, *frames, channels, height, width))


def _pixel_mask(request: InputRequest) -> Tensor:
    shape = (request.batch, *_image_size(request.config))
    check_elements("pixel_mask", shape)
    return torch.ones(shape, dtype=torch.long)


def _is_patched(request: InputRequest) -> bool:
    """Return whether images are passed as a list of patches with the shape of their grid, as in SigLIP 2."""
    return "spatial_shapes" in forward_arguments(request.module)


def _grid(request: InputRequest) -> int:
    return math.isqrt(_first(request.config, "num_patches", 256))  # patches of a square image


def _patch_mask(request: InputRequest) -> Tensor:
    return torch.ones(request.batch, _grid(request) ** 2, dtype=torch.long)


def _grids(request: InputRequest) -> Tensor:
    return torch.full((request.batch, 2), _grid(request), dtype=torch.long)


def _features(request: InputRequest) -> Tensor:
    """Make spectrograms: Whisper's (B, mel, 2 x positions), since a convolution halves the time, or else (B, T, mel).

    CLAP takes (B, channel, T, mel) and folds it to an image of spec_size x spec_size.
    """
    positions, mel = _first(request.config, "max_source_positions", 0), _first(request.config, "num_mel_bins", 0)
    spec = _first(request.config, "spec_size", 0)
    if spec and mel:
        channels = 4 if _first(request.config, "enable_fusion", False) else 1  # CLAP: the whole clip and three crops
        return _normal("input_features", request, (request.batch, channels, spec * spec // mel, mel))
    if positions and mel:
        return _normal("input_features", request, (request.batch, mel, 2 * positions))
    for name in ("feature_projection_input_dim", "input_feat_per_channel", "input_dim"):
        if width := _first(request.config, name, 0):
            return _normal("input_features", request, (request.batch, 256, width))
    raise ModelError(Message("errors.inputs.no_shape", name="input_features"), hint=file_hint(request.module))


def _values(request: InputRequest) -> Tensor:
    """Make waveforms (B, samples) of about 50 frames, or spectrograms (B, T, mel) if the config has mel bins.

    A SpeechT5 encoder without a prenet takes the prenet's output instead: (B, L, width).
    """
    if request.config.model_type == "speecht5" and not _has_prenet(request, "encoder"):
        return _steps("input_values", request, "hidden_size")
    stride = _first(request.config, "conv_stride", None)
    if stride is not None:
        # 400 samples are what the first frame of Wav2Vec2 sees.
        return _normal("input_values", request, (request.batch, 50 * math.prod(stride) + 400))
    length, mel = _first(request.config, "max_length", 1024), _first(request.config, "num_mel_bins", 0)
    if mel:
        return _normal("input_values", request, (request.batch, length, mel))
    return _normal("input_values", request, (request.batch, 16000))


def _decoder_values(request: InputRequest) -> Tensor:
    """Make spectrograms (B, L, mel) for SpeechT5's decoder; without a prenet, make the prenet's output instead."""
    return _steps("decoder_input_values", request, "num_mel_bins" if _has_prenet(request, "decoder") else "hidden_size")


def _has_prenet(request: InputRequest, part: str) -> bool:
    return any(f".{name}".endswith(f".{part}.prenet") for name, _ in request.module.named_modules())


def _latents(request: InputRequest) -> Tensor:
    """Make inputs for a Perceiver without a preprocessor: d_model numbers for each position."""
    return _steps("inputs", request, "d_model")


def _series(request: InputRequest) -> Tensor:
    """Make time series (B, T, channels), or TimesFM's (B, T), which it cuts into patches."""
    length, channels = (_first(request.config, name, 0) for name in ("context_length", "num_input_channels"))
    # TimesFM has a patch length and no channels; PatchTST has both.
    if length and _first(request.config, "patch_length", 0) and not channels:
        return _normal("past_values", request, (request.batch, length))
    if not length or not channels:
        raise ModelError(Message("errors.inputs.no_shape", name="past_values"), hint=file_hint(request.module))
    return _normal("past_values", request, (request.batch, length, channels))


def _steps(name: str, request: InputRequest, width: str | None) -> Tensor:
    """Make (B, L, width) with the width that a config field names; None stands for width 1."""
    size = 1 if width is None else _first(request.config, width, 0)
    if not size:
        raise ModelError(Message("errors.inputs.no_shape", name=name), hint=file_hint(request.module))
    return _normal(name, request, (request.batch, request.seq_len, size))


def _timesteps(request: InputRequest) -> Tensor:
    return torch.arange(request.seq_len).expand(request.batch, -1).contiguous()


def _normal(name: str, request: InputRequest, shape: tuple[int, ...]) -> Tensor:
    check_elements(name, shape)
    _note(request, Message("premises.inputs.random", name=name, seed=request.seed))
    return torch.randn(shape, generator=torch.Generator().manual_seed(request.seed))


def _first(config: Any, name: str, default: Any) -> Any:
    """Return a field of the config or of one of its towers, or the default."""
    # The config first: a tower may have another value for the same field.
    for part in (config, *(getattr(config, tower, None) for tower in TOWERS)):
        value = getattr(part, name, None)
        if value is not None:
            return value
    return default


def _image_size(config: Any) -> tuple[int, int]:
    size = _first(config, "image_size", DEFAULT_IMAGE_SIZE)
    if isinstance(size, int):
        return size, size
    # image_size is 224, (224, 160) or {"height": 224, "width": 160}, depending on the model.
    height, width = size if isinstance(size, (list, tuple)) else (size["height"], size["width"])
    return int(height), int(width)


MAKERS: dict[str, Callable[[InputRequest], Tensor]] = {
    "input_ids": _ids,
    "pixel_values": _pixels,
    "pixel_mask": _pixel_mask,
    "pixel_attention_mask": _patch_mask,
    "spatial_shapes": _grids,
    "input_features": _features,
    "input_values": _values,
    "inputs": _latents,
    "past_values": _series,
    "past_values_padding": lambda request: torch.zeros_like(_series(request), dtype=torch.long),
    "freq": lambda request: torch.zeros(request.batch, 1, dtype=torch.long),
    "states": lambda request: _steps("states", request, "state_dim"),
    "actions": lambda request: _steps("actions", request, "act_dim"),
    "rewards": lambda request: _steps("rewards", request, None),
    "returns_to_go": lambda request: _steps("returns_to_go", request, None),
    "timesteps": _timesteps,
    "attention_mask": _mask,
    "token_type_ids": _types,
    "decoder_input_ids": lambda request: _ids(request, salt=1),
    "decoder_input_values": _decoder_values,
}

"""Makes inputs of the right kind for a model: ids, pixels, audio features, and inputs of its decoder."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk.errors import InvalidValueError, ModelError, SqrtdkError, kind_and_text
from sqrtdk.messages import Message
from sqrtdk.models.config import text_config
from sqrtdk.models.demo import CONTEXT, DemoModel
from sqrtdk.models.limits import check_elements, check_seed, check_sizes
from sqrtdk.models.makers import MAKERS, InputRequest
from sqrtdk.models.modules import config_of, file_hint, forward_arguments, is_spread
from sqrtdk.models.records import Inputs
from sqrtdk.models.tokens import byte_ids, embedded_text, read_text

DEFAULT_SEQ_LEN = 128
WINDOW_FIELDS = ("sliding_window", "sliding_window_size", "attention_window_size")  # fields of configs and modules
LONGEST_WINDOW = 256  # the default length reaches past sliding windows up to this size
IMAGE_TOKENS = ("image_token_id", "image_token_index", "image_token")
EPISODE = ("states", "actions", "rewards", "returns_to_go", "timesteps")  # inputs of a decision transformer


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
    """Make inputs for a Hugging Face model on the CPU, from its config and the signature of its forward.

    Args:
        module: The model; its `forward` names the inputs that it takes.
        config: Its config.
        batch: Rows.
        seq_len: Tokens per row, at most the number of the model's positions. None takes 128, or more to reach past a
            sliding window of up to 256 keys, or that limit if it is lower.
        seed: Seed of random ids, pixels and audio.
        text: A UTF-8 file for the tokenizer; None takes the embedded text, or random ids without a tokenizer.
        directory: Where the tokenizer's files lie.

    Returns:
        Inputs by the names of forward's arguments, and notes.

    Raises:
        InvalidValueError: `batch` or `seq_len` is below 1, an input exceeds `MAX_ELEMENTS`, or torch lacks the seed.
        ModelError: The model needs an input that can't be made here, or `text` can't be used.
    """
    check_seed(seed)
    length, notes = _length(batch, seq_len, position_limit(module, config), _beyond_window(config))
    if (only := _only_length(config)) is not None and length != only:
        notes = [*notes, Message("premises.inputs.only_length", length=only)]
        length = only
    request = InputRequest(module, config, batch, length, seed, directory, read_text(text) if text else None, notes)
    accepted = forward_arguments(module)
    wanted = [name for name in MAKERS if name in accepted and _wants(name, request, accepted)]
    if any(p.is_meta for p in module.parameters()) and not is_spread(module):
        # A mask of ones hides nothing, but on meta a model can't see that.
        wanted = [name for name in wanted if not name.endswith("_mask") or accepted[name]]
    inputs: dict[str, Any] = {}
    for name in wanted:
        try:
            inputs[name] = MAKERS[name](request)
        except SqrtdkError:
            raise
        except Exception as error:  # fields of an untrusted config may have any type
            raise ModelError(
                Message("errors.inputs.not_made", name=name, reason=kind_and_text(error)), hint=file_hint(module)
            ) from error
    missing = [name for name, needed in accepted.items() if needed and name not in inputs]
    if missing or not inputs:
        raise ModelError(
            Message("errors.inputs.wants", kind=type(module).__name__, names=", ".join(missing) or "inputs"),
            hint=file_hint(module),
        )
    if request.text is not None and "input_ids" not in inputs:
        raise ModelError(
            Message("errors.inputs.no_text", kind=type(module).__name__),
            hint=Message("errors.hint.leave_text_out", inputs=file_hint(module)),
        )
    return inputs, tuple(notes)


def guess_inputs(
    module: nn.Module, *, batch: int = 1, seq_len: int | None = None, seed: int = 0
) -> tuple[Inputs, tuple[str, ...]]:
    """Return inputs for a module that was passed to a function of the Python API without any.

    Args:
        module: The module, whose Hugging Face config says what it takes.
        batch: Number of rows.
        seq_len: Number of tokens; None: our own choice.
        seed: Of random ids.

    Returns:
        Inputs on the module's device, and notes on what was chosen.

    Raises:
        InvalidValueError: The module has no config, or see `make_inputs`.
        ModelError: See `make_inputs`.

    Example:
        >>> guess_inputs(nn.Linear(4, 4))
        Traceback (most recent call last):
        sqrtdk.errors.InvalidValueError: no inputs were given, and Linear has no config to make them from
        Hint: Give inputs for forward(input): a factory may return (module, inputs); on the command line \
--input FILE.safetensors; in Python inputs=(...) or inputs={...}.
    """
    if isinstance(module, DemoModel):
        made, notes = demo_inputs(batch=batch, seq_len=seq_len)
        return move_inputs(made, module), notes
    config = config_of(module)
    if config is None:
        accepted = ", ".join(forward_arguments(module)) or "*args, **kwargs"
        raise InvalidValueError(
            Message("errors.inputs.no_config", kind=type(module).__name__),
            hint=Message("errors.hint.pass_inputs", accepted=accepted),
        )
    made, notes = make_inputs(module, config, batch=batch, seq_len=seq_len, seed=seed)
    return move_inputs(made, module), notes


def demo_inputs(
    *, batch: int = 1, seq_len: int | None = None, text: str | Path | None = None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Make inputs for the embedded model: bytes of a UTF-8 file or of the embedded text.

    Raises:
        InvalidValueError: See `make_inputs`.
        ModelError: `text` can't be used.
    """
    length, notes = _length(batch, seq_len, CONTEXT)
    check_elements("input_ids", (batch, length))
    wanted = read_text(text) if text is not None else embedded_text()
    return {"input_ids": byte_ids(wanted, batch=batch, length=length)}, tuple(notes)


def _length(
    batch: int, seq_len: int | None, limit: int | None, default: int = DEFAULT_SEQ_LEN
) -> tuple[int, list[str]]:
    """Return the tokens per row, at most `limit`, and a note if the requested length was cut."""
    check_sizes(batch, seq_len)
    length = seq_len if seq_len is not None else min(default, limit or default)
    if limit is None or length <= limit:
        return length, []
    return limit, [Message("premises.inputs.cut", length=length, most=limit)]


def _only_length(config: Any) -> int | None:
    """Return the only length that a Nystroemformer takes, or None; with a landmark for each token it takes any."""
    length, landmarks = (getattr(config, name, None) for name in ("segment_means_seq_len", "num_landmarks"))
    return length if isinstance(length, int) and length != landmarks else None


def _beyond_window(config: Any) -> int:
    """Return a number of tokens that shows where a sliding window ends, unless the window is too long for that."""
    part = text_config(config)
    names = [*WINDOW_FIELDS]
    if getattr(part, "attention_layers", None) is not None:  # GPT-Neo
        names.append("window_size")
    widths = []
    for name in names:
        with contextlib.suppress(Exception):  # transformers' configs raise on fields that differ between layers
            widths.append(getattr(part, name, None))
    # Eight rows see less than all keys before them, which shows the window's end.
    return max([DEFAULT_SEQ_LEN, *(n + 8 for n in widths if type(n) is int and n <= LONGEST_WINDOW)])


def without_numbers(module: nn.Module, inputs: Inputs | None) -> bool:
    """Return whether a run would have no values: some weight or input is on the device "meta".

    Weights that accelerate offloaded are on "meta" too, but are loaded when they are needed; they count as values.
    """
    values = inputs.values() if isinstance(inputs, dict) else inputs or ()
    return not is_spread(module) and any(x.is_meta for x in (*module.parameters(), *values) if isinstance(x, Tensor))


def move_inputs(inputs: Inputs, module: nn.Module) -> Inputs:
    """Return the inputs with tensors on the module's device, and floating-point tensors in its dtype.

    Device and dtype are those of its first floating-point parameter; of a model that accelerate has spread, the device
    on which it computes. Other values are kept, as are all inputs of a module without such a parameter.

    Args:
        inputs: A dict or a tuple; the result has the same form.
        module: The module.

    Raises:
        InvalidValueError: An input is on the meta device, but the weights are not.
    """
    first = next((p for p in module.parameters() if p.is_floating_point()), None)
    if first is None:
        return inputs
    # Accelerate keeps offloaded weights on meta; its hook says where it computes.
    device = getattr(getattr(module, "_hf_hook", None), "execution_device", None) or first.device

    def move(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.is_meta and torch.device(device).type != "meta":
            raise InvalidValueError(
                Message("errors.inputs.on_meta", device=str(device), shape=str(tuple(value.shape))),
                hint=Message("errors.hint.inputs_on_cpu"),
            )
        return value.to(device, first.dtype) if value.is_floating_point() else value.to(device)

    if isinstance(inputs, dict):
        return {name: move(value) for name, value in inputs.items()}
    return tuple(move(value) for value in inputs)


def position_limit(module: nn.Module, config: Any) -> int | None:
    """Return the largest number of tokens that the model has positions for; None if nothing says so.

    Args:
        module: The model, whose learned position embeddings are counted.
        config: Its config, whose `max_position_embeddings` or the like is read.
    """
    part = text_config(config)
    names = ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len", "max_text_positions")
    stated = [getattr(part, name, None) for name in names]
    limits = [value for value in stated if isinstance(value, int) and not isinstance(value, bool) and value > 0]
    for name, child in module.named_modules():  # RoBERTa's positions start after its padding index
        if name.endswith("position_embeddings") and isinstance(child, nn.Embedding) and child.padding_idx is not None:
            limits.append(child.num_embeddings - child.padding_idx - 1)
    return min(limits) if limits else None


def _wants(name: str, request: InputRequest, accepted: dict[str, bool]) -> bool:
    """Return whether to make an argument that the model accepts but does not require."""
    main = getattr(request.module, "main_input_name", "input_ids")
    if accepted[name] or name == main:
        return True
    if name in ("input_ids", "attention_mask"):
        return main == "input_ids" or (name == "input_ids" and hasattr(request.config, "text_config"))
    if name in ("decoder_input_ids", "decoder_input_values"):
        return bool(getattr(request.config, "is_encoder_decoder", False))
    if name in EPISODE:
        return main == EPISODE[0]
    if name == "token_type_ids":  # it says which tokens see each other; other models fill in the zeros themselves
        return _places_tokens(request.config)
    if name in ("pixel_values", "input_features", "input_values"):
        if _places_tokens(request.config):
            request.notes.append(Message("premises.inputs.text_only", names=name))
            return False
        parts = ("vision_config", "image_config", "image_size") if name == "pixel_values" else ("audio_config",)
        return any(hasattr(request.config, part) for part in parts)
    if name in ("spatial_shapes", "pixel_attention_mask"):
        return "spatial_shapes" in accepted and _wants("pixel_values", request, accepted)
    return name == "pixel_mask" and "pixel_values" in accepted


def _places_tokens(config: Any) -> bool:
    """Return whether images or sounds appear in the text as tokens of their own."""
    return any(hasattr(config, name) for name in (*IMAGE_TOKENS, "audio_token_id"))

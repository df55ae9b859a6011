"""Builds a Hugging Face model from a local directory: weights from safetensors, random weights, or none (meta)."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk.errors import INTERRUPTS, ModelError, SqrtdkError, kind_and_text, short_text, text_of
from sqrtdk.messages import Message, id_of, joined
from sqrtdk.models.checkpoint import weight_files
from sqrtdk.models.config import DTYPE_NAMES, MODEL_DTYPES, load_config, read_json
from sqrtdk.models.extras import (
    build_options,
    import_accelerate,
    import_transformers,
    quiet_transformers,
    stored_dtype,
)
from sqrtdk.models.links import refuse_stray_files
from sqrtdk.models.memory import available_memory, model_bytes, require_memory
from sqrtdk.models.packed import dequantised_state, packing_of

GENERATION = "generation_config.json"
_QUANTISED_CONFIG = "premises.config.quantization"
_ABSENT_WEIGHTS_MESSAGE = "premises.weights.absent"

# transformers' auto classes in the order in which they are searched for an architecture; AutoModel is the fallback.
AUTO_CLASSES = (
    "AutoModelForCausalLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM",
    "AutoModelForImageTextToText",
    "AutoModelForMultimodalLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "AutoModelForQuestionAnswering",
    "AutoModelForMultipleChoice",
    "AutoModelForNextSentencePrediction",
    "AutoModelForImageClassification",
    "AutoModelForMaskedImageModeling",
    "AutoModelForZeroShotImageClassification",
    "AutoModelForObjectDetection",
    "AutoModelForZeroShotObjectDetection",
    "AutoModelForSemanticSegmentation",
    "AutoModelForUniversalSegmentation",
    "AutoModelForInstanceSegmentation",
    "AutoModelForImageSegmentation",
    "AutoModelForDepthEstimation",
    "AutoModelForVideoClassification",
    "AutoModelForAudioClassification",
    "AutoModelForAudioFrameClassification",
    "AutoModelForAudioXVector",
    "AutoModelForCTC",
    "AutoModelForTextEncoding",
    "AutoModelForPreTraining",
    "AutoBackbone",
    "AutoModel",
)


class AttnRefusedError(ModelError):
    """The model has no attention implementation of the requested name."""


def parse_dtype(name: str | torch.dtype | None) -> torch.dtype | None:
    """Return the dtype of a name.

    Raises:
        ModelError: The name is not float32, float16, bfloat16, float64, or an alias of one.

    Example:
        >>> parse_dtype("bfloat16"), parse_dtype("fp16"), parse_dtype("torch.float32")
        (torch.bfloat16, torch.float16, torch.float32)
    """
    if name is None or isinstance(name, torch.dtype):
        return name
    full = name.removeprefix("torch.")
    full = DTYPE_NAMES.get(full, full)
    if full not in MODEL_DTYPES:
        of_a_cache = re.match("u?int|float8|fp8|q[0-9]", name)
        hint = "errors.hint.dtype_of_cache" if of_a_cache else "errors.hint.one_of"
        names = joined((*MODEL_DTYPES, *DTYPE_NAMES), "comma")
        raise ModelError(Message("errors.options.dtype", name=repr(name)), hint=Message(hint, names=names))
    dtype: torch.dtype = getattr(torch, full)
    return dtype


def auto_class(config: Any, *, trust_remote_code: bool = False) -> tuple[Any, str | None]:
    """Return transformers' auto class for a config, and a note if it is not the one that the config asks for.

    An architecture's name is only compared with the classes in transformers' own tables for this config's type. It is
    never looked up as an attribute, because the name is untrusted.

    Raises:
        ModelError: transformers has no model for this config, or `architectures` is not a list.
    """
    hf = import_transformers()
    autos = [getattr(hf, name) for name in AUTO_CLASSES if hasattr(hf, name)]
    # The repository's own class wins, as it does in `from_pretrained`.
    if trust_remote_code and isinstance(getattr(config, "auto_map", None), dict):
        for auto in autos:
            if auto.__name__ in config.auto_map:
                return auto, None
    names = getattr(config, "architectures", None)
    if not isinstance(names, (list, tuple, type(None))):
        raise ModelError(
            Message("errors.config.architectures", kind=type(names).__name__),
            hint=Message("errors.hint.architectures"),
        )
    wanted = [name for name in names or () if isinstance(name, str)]
    known = []
    for auto in autos:
        mapping = auto._model_mapping
        if type(config) not in mapping:
            continue
        known.append(auto)
        classes = mapping[type(config)]
        classes = classes if isinstance(classes, (list, tuple)) else (classes,)
        if any(cls.__name__ in wanted for cls in classes):
            return auto, None
    if not known:
        raise ModelError(
            Message("errors.config.no_model", kind=type(config).__name__),
            hint=Message("errors.hint.factory"),
        )
    # The bare model has every attention, and needs no head that the checkpoint may lack.
    auto = next((a for a in known if a.__name__ == "AutoModel"), known[0])
    if not wanted:
        return auto, None
    return auto, Message("premises.config.architectures", names=repr(wanted[:3]), used=auto.__name__)


def build_model(
    home: Path,
    *,
    static: bool = False,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    seed: int = 0,
    trust_remote_code: bool = False,
    attn: str | None = None,
    device_map: str | None = None,
    offload_folder: str | Path | None = None,
) -> tuple[nn.Module, Any, tuple[str, ...]]:
    """Build the model of a local directory, or of a config alone, in eval mode.

    The model is first built on the meta device, where it takes no memory, and its size is counted. It is only built for
    real if it fits. Without weight files, the weights are random and depend only on the seed.

    Args:
        home: A directory with `config.json`, and with or without safetensors weights; or a config file.
        static: Stop after the meta build.
        dtype: Dtype of the parameters; None takes the config's (float16 on a CPU becomes float32, with a note).
        device: Where to put the model; unused with `static` or `device_map`.
        seed: Seed of random weights.
        trust_remote_code: Let the directory's own Python files run.
        attn: "eager" or "sdpa"; None takes the model's default.
        device_map: Passed to transformers, e.g. "auto": accelerate spreads the weights over devices, memory and disk.
        offload_folder: Directory for weights that fit nowhere else.

    Returns:
        The module, its config, and notes.

    Raises:
        ModelError: See `refuse_stray_files`, `weight_files` and `load_config`. Or `generation_config.json` is not an
            object, the model does not fit, or transformers can't build it.
        MissingExtraError: transformers, or accelerate for a device map, is missing.
    """
    alone = home.is_file()
    if not alone:
        refuse_stray_files(home, trust_remote_code=trust_remote_code)
    config, config_notes = load_config(home, trust_remote_code=trust_remote_code)
    notes = [*config_notes, *([Message("premises.config.alone", path=repr(str(home)))] if alone else [])]
    auto, note = auto_class(config, trust_remote_code=trust_remote_code)
    notes += [note] if note else []
    if (home / GENERATION).is_file():
        read_json(home / GENERATION)
    quantised = any(id_of(note) == _QUANTISED_CONFIG for note in notes)
    files = [] if static or alone else weight_files(home, quantised=quantised)
    packing = packing_of(home) if files else None
    if packing is not None:
        notes = [note for note in notes if id_of(note) != _QUANTISED_CONFIG]
        notes.append(Message("premises.weights.dequantised", method=repr(packing.method)))
        dtype = dtype or torch.float32  # what is dequantised fits no coarser dtype
    if device_map is not None and not files and not static:
        raise ModelError(Message("errors.options.device_map_no_weights"), hint=Message("errors.hint.static"))
    mapped = sum((home / name).stat().st_size for name in files)
    dtype, note = _run_dtype(config, dtype, device)
    notes += [note] if note else []
    common = build_options(dtype, static=static) | {"trust_remote_code": trust_remote_code}
    if attn:
        common["attn_implementation"] = _attn_for(config, attn)
    try:
        # Building draws random numbers; the caller's random state must not move.
        with quiet_transformers(), torch.random.fork_rng(devices=[]):
            with torch.device("meta"):
                module = auto.from_config(copy.deepcopy(config), **common)
            module = module.to("meta")  # XLNet makes parameters by torch.FloatTensor, which ignores torch.device
            if not static:
                if device_map is None:
                    require_memory(type(module).__name__, model_bytes(module), device=device, mapped=mapped)
                meta = module
                del module
                torch.manual_seed(seed)
                if files:
                    loads, state = auto, None
                    if packing is not None:

                        def load(settings: Any) -> nn.Module:
                            own = copy.deepcopy(config)
                            own.quantization_config = settings
                            options = common | build_options(stored_dtype(config) or torch.float32, static=False)
                            return _load_weights(auto, home, own, options, None, None, mapped)[0]

                        loads, state = type(meta), dequantised_state(packing, home, files, meta, load)
                    module, missing = _load_weights(
                        loads, home, config, common, device_map, offload_folder, mapped, state
                    )
                    notes += missing
                else:
                    notes.append(Message("premises.weights.random", seed=seed))
                    module = auto.from_config(copy.deepcopy(config), **common)
                if device_map is None:
                    module = module.to(device)
    except (*INTERRUPTS, SqrtdkError):
        raise
    except BaseException as error:  # transformers and the model's own code may raise anything on untrusted files
        raise_if_attn_refused(error, attn)
        raise ModelError(
            Message("errors.model.not_built", reason=kind_and_text(error)),
            hint=_build_hint(error),
        ) from error
    module.eval()
    return module, module.config, tuple(notes)


def _attn_for(config: Any, attn: str) -> str | dict[str, str]:
    """Return the implementation of the model and its parts, without a convolutional backbone, which has none."""
    parts = list(type(config).sub_configs)
    if "backbone_config" not in parts:
        return attn
    return {"": attn} | {name: attn for name in parts if name != "backbone_config"}


def _run_dtype(config: Any, dtype: torch.dtype | None, device: str) -> tuple[torch.dtype, str | None]:
    if dtype is not None:
        return dtype, None
    stored = stored_dtype(config)
    if stored is None:
        return torch.float32, None
    # float16 products on a CPU are hundreds of times slower than float32, and many operations lack them.
    if stored == torch.float16 and device == "cpu":
        return torch.float32, Message("premises.weights.float32")
    return stored, None


def _load_weights(
    auto: Any,
    directory: Path,
    config: Any,
    common: dict[str, Any],
    device_map: str | None,
    offload_folder: str | Path | None,
    mapped: int,
    state: dict[str, Tensor] | None = None,
) -> tuple[nn.Module, list[str]]:
    """Return a model with its weights, and notes on weights that are missing or not used."""
    spread: dict[str, Any] = {}
    if device_map is not None:
        spread = {"device_map": device_map, "max_memory": _max_memory(import_accelerate(), mapped)}
        if offload_folder is not None:
            spread["offload_folder"] = str(offload_folder)
    if state is not None:
        spread["state_dict"] = state
    # a class itself takes weights without a directory, which the auto classes look into
    module, loading_report = auto.from_pretrained(
        str(directory) if state is None else None,
        config=copy.deepcopy(config),
        local_files_only=True,
        use_safetensors=True,
        weights_only=True,
        output_loading_info=True,
        **common,
        **spread,
    )
    missing = sorted(loading_report.get("missing_keys") or ())
    unused = sorted(loading_report.get("unexpected_keys") or ())
    notes: list[str] = []
    if missing:
        notes.append(Message(_ABSENT_WEIGHTS_MESSAGE, count=len(missing), name=repr(missing[0])))
    if unused:
        notes.append(Message("premises.weights.unused", count=len(unused), name=repr(unused[0][:200])))
    return module, notes


def lacks_weights(note: str) -> bool:
    """Return whether a note of `build_model` says that weights are random because the checkpoint lacks them."""
    return id_of(note) == _ABSENT_WEIGHTS_MESSAGE


def _max_memory(accelerate: Any, mapped: int) -> dict[Any, int]:
    """Return accelerate's own limits for the accelerators, and for the CPU half of what this process may take."""
    room: dict[Any, int] = accelerate.utils.get_max_memory()
    available = available_memory(mapped=mapped)
    if available is not None:
        # Half, as accelerate loads a shard beside the weights that it fills.
        room["cpu"] = min(room.get("cpu", available), available // 2)
    return room


def raise_if_attn_refused(error: BaseException, attn: str | None) -> None:
    """Turn an error of transformers into `AttnRefusedError`, if it says that a model lacks an attention implementation.

    Args:
        error: The error that transformers raised.
        attn: The requested implementation, such as "sdpa"; None: no error is turned.

    Raises:
        AttnRefusedError: The error says so; otherwise the function returns.
    """
    text = text_of(error)
    if attn is not None and ("scaled_dot_product_attention" in text or "attn_implementation" in text):
        raise AttnRefusedError(
            Message("errors.options.attn_refused", attn=attn, why=short_text(error, 120)),
            hint=Message("errors.options.attn_option_left_out"),
        ) from error


def _build_hint(error: BaseException) -> Message:
    text = text_of(error)
    if isinstance(error, ImportError):
        return Message("errors.hint.install_named")
    # SafetensorError, or a text about a Safetensors or safetensors file.
    if "afetensor" in type(error).__name__ + text or "header" in text.lower():
        return Message("errors.hint.damaged_weights")
    return Message("errors.hint.config_and_weights")

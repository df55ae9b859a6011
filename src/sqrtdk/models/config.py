"""Reads a model's config.json, which is untrusted text.

The file is parsed here, cleaned, and checked for size before transformers' own config class gets it. Fields that would
choose code or download something (kernel names, `auto_map`, pretrained backbones, quantisers) are dropped.
"""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

from sqrtdk import _files
from sqrtdk.errors import INTERRUPTS, ModelError, kind_and_text
from sqrtdk.messages import Message
from sqrtdk.models.checkpoint import config_path
from sqrtdk.models.extras import import_transformers
from sqrtdk.models.limits import read_bytes

MAX_CONFIG_BYTES = 10 * 2**20
MAX_CONFIG_DEPTH = 20
MAX_CONFIG_ENTRIES = 1_000_000
MAX_LAYERS_TIMES_EXPERTS = 100_000
JSON = (dict, list)
IGNORED = "premises.config.ignored"
_WHOSE = "errors.hint.whose_config"  # id of a sentence
MODEL_DTYPES = ("float32", "float16", "bfloat16", "float64")
DTYPE_NAMES = {  # common aliases
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp64": "float64",
    "float": "float32",
    "half": "float16",
    "double": "float64",
}

# (pattern of keys, largest integer, what it counts). They bound the time of a build; its memory is counted on meta.
LIMITS = (
    (re.compile(r"(layers?|depths?|num_blocks)$"), 1_000, "layers"),
    (re.compile(r"experts$"), 4_096, "experts"),
    (re.compile(r"(heads?|groups)$"), 4_096, ""),
    (re.compile(r"num_labels$"), 1_000_000, ""),
    (re.compile(r"(positions?|position_embeddings|seq_len|seq_length|window_size)$"), 2**25, ""),
    (re.compile(r""), 2**31, ""),
)

# These choose an implementation, which may be code from the hub, so the user is told.
DROPPED_ALOUD = ("attn_implementation", "experts_implementation", "kernel_config", "use_kernels")
DROPPED_QUIETLY = (
    "_name_or_path",
    "name_or_path",
    "_commit_hash",
    "configuration_files",
    "gguf_file",
    "output_attentions",
    "output_hidden_states",
    "max_length",
    "model_max_length",
    "quantization_config",
    "compression_config",
)


def read_config_dict(home: Path) -> dict[str, Any]:
    """Parse the config of a model directory, or a config file.

    Raises:
        ModelError: The file is missing, or see `read_json`.
    """
    try:
        return read_json(config_path(home))
    except OSError as error:
        raise ModelError(
            Message("errors.config.none", home=repr(str(home)), reason=_files.os_reason(error)),
            hint=Message("errors.hint.saved_model"),
        ) from error


def read_json(path: Path, limit: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Parse a JSON file that holds an object.

    Args:
        path: The file.
        limit: Largest size, in bytes.

    Raises:
        OSError: The file can't be read.
        ModelError: The file is not regular, over the limit, not JSON, nested more than 20 deep, has over a million
            entries, or is not an object.
    """
    name = repr(str(path))
    try:
        raw = json.loads(read_bytes(path, name, limit).decode("utf-8"))
    except RecursionError as error:
        raise ModelError(Message("errors.config.deep", name=name), hint=Message(_WHOSE)) from error
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, or an integer with thousands of digits
        raise ModelError(
            Message("errors.config.no_json", name=name, reason=str(error)), hint=Message("errors.hint.restore")
        ) from error
    if not isinstance(raw, dict):
        raise ModelError(Message("errors.config.no_object", name=name, kind=type(raw).__name__), hint=Message(_WHOSE))
    entries, layer = 0, [raw]  # `layer` holds all values of one depth
    for _ in range(MAX_CONFIG_DEPTH + 1):
        nested = [value.values() if isinstance(value, dict) else value for value in layer if isinstance(value, JSON)]
        layer = list(itertools.chain.from_iterable(nested))
        entries += len(layer)
    if layer or entries > MAX_CONFIG_ENTRIES:
        raise ModelError(Message("errors.config.deep_or_many", name=name), hint=Message(_WHOSE))
    return raw


def clean_config_dict(raw: dict[str, Any], *, trust_remote_code: bool = False) -> tuple[dict[str, Any], list[str]]:
    """Drop fields that choose code, at every depth, and refuse sizes that no model has.

    Returns:
        The cleaned copy, and a note for each name that was ignored.

    Raises:
        ModelError: An integer is over its limit.

    Example:
        >>> clean_config_dict({"n_layer": 2, "text_config": {"attn_implementation": "someone/kernel"}})
        ({'n_layer': 2, 'text_config': {}}, ["text_config.attn_implementation = 'someone/kernel' was ignored"])
        >>> clean_config_dict({"num_hidden_layers": 10**9})
        Traceback (most recent call last):
        sqrtdk.errors.ModelError: config: num_hidden_layers = 1000000000 is over the limit of 1000
        Hint: No known model is this large; check the config.
    """
    notes: list[str] = []
    sizes = {"layers": 1, "experts": 1}

    def walk(value: Any, path: str, key: str) -> Any:
        if isinstance(value, dict):
            if set(value) == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
                return float(value["__float__"])
            return {
                name: walk(item, f"{path}.{name}" if path else name, name)
                for name, item in value.items()
                if keep(name, item, f"{path}.{name}" if path else name)
            }
        if isinstance(value, list):
            return [walk(item, path, key) for item in value]
        if isinstance(value, int) and not isinstance(value, bool):
            check_size(value, path, key)
        # A pretrained backbone would be downloaded.
        return False if key == "use_pretrained_backbone" else value

    def keep(name: str, item: Any, path: str) -> bool:
        if any(word in name for word in DROPPED_ALOUD):
            if item is not None:
                notes.append(Message(IGNORED, name=path[:200], value=_short(item)))
            return False
        if name in ("dtype", "torch_dtype"):
            return item in MODEL_DTYPES
        if name == "auto_map":
            return trust_remote_code
        return name not in DROPPED_QUIETLY and not name.startswith("__")

    def check_size(value: int, path: str, key: str) -> None:
        # The last pattern matches every key.
        limit, counts = next((limit, counts) for pattern, limit, counts in LIMITS if pattern.search(key))
        if abs(value) > limit:
            raise ModelError(
                Message("errors.config.limit", path=path[:200], value=_short(value), limit=limit),
                hint=Message("errors.hint.too_large"),
            )
        if counts:
            sizes[counts] = max(sizes[counts], value)
        if sizes["layers"] * sizes["experts"] > MAX_LAYERS_TIMES_EXPERTS:
            raise ModelError(
                Message(
                    "errors.config.experts",
                    layers=sizes["layers"],
                    experts=sizes["experts"],
                    limit=MAX_LAYERS_TIMES_EXPERTS,
                ),
                hint=Message("errors.hint.too_large"),
            )

    return walk(raw, "", ""), notes


def load_config(home: Path, *, trust_remote_code: bool = False) -> tuple[Any, tuple[str, ...]]:
    """Read, clean and build the config of a model directory, with transformers' own class for its `model_type`.

    Args:
        home: Local directory with `config.json`, or a config file.
        trust_remote_code: Let a config that names its own Python files (`auto_map`) run them.

    Returns:
        The config, without any implementation name in it, and notes on what was ignored.

    Raises:
        ModelError: The config is unreadable, over a limit, of an unknown model type, or rejected by its class.
        MissingExtraError: transformers is missing or too old.
    """
    hf = import_transformers()
    raw = read_config_dict(home)
    file = config_path(home)
    trust_remote_code &= file != home  # a config file alone has no directory with code
    clean, notes = clean_config_dict(raw, trust_remote_code=trust_remote_code)
    if raw.get("quantization_config"):
        notes.append(Message("premises.config.quantization"))
    model_type = clean.pop("model_type", None)
    try:
        if clean.get("auto_map"):  # only with trust_remote_code
            _refuse_outside(clean["auto_map"])
            config = hf.AutoConfig.from_pretrained(home, trust_remote_code=True, local_files_only=True)
            # The caller chooses the implementations, and not the config.
            config._attn_implementation = None
            config._experts_implementation = None
            return config, tuple(notes)
        if not isinstance(model_type, str) or model_type not in hf.CONFIG_MAPPING:
            hint = Message("errors.hint.model_type")
            if isinstance(raw.get("auto_map"), dict):
                hint = Message("errors.hint.trust_remote_code")
                if file == home:
                    hint = Message("errors.hint.code_of_directory")
            raise ModelError(
                Message(
                    "errors.config.model_type", name=file.name, model_type=_short(model_type), version=hf.__version__
                ),
                hint=hint,
            )
        return hf.CONFIG_MAPPING[model_type].from_dict(clean), tuple(notes)
    except (*INTERRUPTS, ModelError):
        raise
    except BaseException as error:  # a config class may raise anything on untrusted values
        raise ModelError(
            Message("errors.config.rejected", reason=kind_and_text(error)),
            hint=Message("errors.hint.config_values"),
        ) from error


def _refuse_outside(auto_map: Any) -> None:
    """Raise if `auto_map` names a file elsewhere: a user who trusts a directory's code has read only that code."""
    for name in [auto_map] if isinstance(auto_map, str | list) else auto_map.values():
        for reference in name if isinstance(name, list) else [name]:
            if isinstance(reference, str) and (reference.startswith("/") or ".." in reference):
                raise ModelError(
                    Message("errors.config.auto_map", reference=_short(reference)),
                    hint=Message("errors.hint.own_files"),
                )


def text_config(config: Any) -> Any:
    """Return the part of a config that describes the text model.

    It is a sub-config, such as `text_config`, or the config itself if there is none.
    """
    for name in ("text_config", "llm_config", "language_config", "thinker_config"):
        part = getattr(config, name, None)
        if part is not None and not isinstance(part, dict):
            return text_config(part)
    return config


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

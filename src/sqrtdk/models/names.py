"""Interprets a MODEL argument: the demo, a factory, a directory, or a hub repository. Imports no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from sqrtdk import _files
from sqrtdk.errors import ModelError
from sqrtdk.messages import Message
from sqrtdk.models import hub
from sqrtdk.models.checkpoint import CONFIG
from sqrtdk.models.config import read_json

FACTORY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
FILE_FACTORY = re.compile(r"(.*[/\\])?([A-Za-z_]\w*)\.py:([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)")
# A hub repository is never called so.
FILE_SUFFIXES = (".json", ".safetensors", ".gguf", ".onnx", ".py", ".bin", ".pt", ".pth", ".ckpt")

DIRECTORY_OR_CONFIG_HINT = "errors.hint.directory_or_config"  # id of a sentence

GRAPHS = (".onnx", ".pt2", ".gguf")  # suffixes of exported graphs
GGML = (".gguf", ".ggmldump")  # suffixes of files that llama.cpp runs, or that hold a run of ggml


def graph_kind(model: str) -> str | None:
    """Return the kind of an exported graph that a MODEL argument names, by its suffix, or None.

    Example:
        >>> graph_kind("out/model.onnx"), graph_kind("net.PT2"), graph_kind("gpt2")
        ('.onnx', '.pt2', None)
    """
    suffix = os.path.splitext(model)[1].lower()
    return suffix if suffix in GRAPHS and not os.path.isdir(model) else None


def ggml_kind(model: str) -> str | None:
    """Return the kind of a file of llama.cpp that a MODEL argument names, by its suffix, or None.

    Example:
        >>> ggml_kind("out/model.GGUF"), ggml_kind("run.ggmldump"), ggml_kind("gpt2")
        ('.gguf', '.ggmldump', None)
    """
    suffix = os.path.splitext(model)[1].lower()
    return suffix if suffix in GGML and not os.path.isdir(model) else None


def is_demo(model: str) -> bool:
    """Return whether a MODEL argument names the built-in demo model.

    Example:
        >>> is_demo("demo:twice"), is_demo("gpt2")
        (True, False)
    """
    return model == "demo" or model.startswith("demo:")


def is_factory(model: str) -> bool:
    """Return whether a MODEL argument has the form `package.module:factory`.

    Example:
        >>> is_factory("zoo.nets:make"), is_factory("meta/llama"), is_factory("C:/models")
        (True, False, False)
    """
    return FACTORY.fullmatch(model) is not None


def calls_factory(model: str) -> bool:
    """Return whether a MODEL argument has the form `package.module:function` and is not the name of a directory."""
    return is_factory(model) and not os.path.isdir(model)


def file_as_module(model: str) -> Message | None:
    """Return a hint if a MODEL argument names a Python file instead of its module, else None.

    Example:
        >>> file_as_module("nets/zoo.py:make")
        "Name the module, not its file: 'zoo:make', in the directory 'nets'."
    """
    match = FILE_FACTORY.fullmatch(model)
    if match is None:
        return None
    directory, name, factory = match.groups()
    module = repr(f"{name}:{factory}")
    if not directory:
        return Message("errors.hint.module_not_file", module=module)
    return Message("errors.hint.module_in_directory", module=module, directory=repr(directory.rstrip("/") or "/"))


def find_local(model: str) -> Path | None:
    """Return the model's local directory or its config file, or None if the argument can only be a hub id.

    Raises:
        ModelError: The path does not exist, or is neither a readable directory nor a config.
    """
    name = os.path.expanduser(model)
    path = Path(name)
    # A config.json stands for its directory.
    if path.name == CONFIG and os.path.isfile(name):
        path = path.parent
    if model and os.path.isdir(path):
        if not os.access(path, os.R_OK | os.X_OK):
            raise ModelError(
                Message("errors.files.no_permission", model=repr(model)), hint=Message("errors.hint.permissions")
            )
        return path
    if os.path.isfile(name):
        if _names_model_type(path):
            return path
        is_beside = (path.parent / CONFIG).is_file()
        beside = Message("errors.hint.its_directory", directory=repr(str(path.parent))) if is_beside else None
        if beside is None and path.suffix.lower() == ".safetensors":  # a trace file, which another program wrote
            beside = Message("errors.hint.trace_file", model=repr(model))
        if path.suffix == ".py":  # `check port.py`
            beside = Message("errors.hint.name_function", module=repr(f"{path.stem}:make"))
        raise ModelError(
            Message("errors.model.no_config_file", model=repr(model)), hint=beside or Message(DIRECTORY_OR_CONFIG_HINT)
        )
    if named := file_as_module(model):
        raise ModelError(Message("errors.model.file_not_module", model=repr(model)), hint=named)
    if model and os.path.lexists(name):
        raise ModelError(
            Message("errors.files.not_directory", model=repr(model)), hint=Message(DIRECTORY_OR_CONFIG_HINT)
        )
    if model.isidentifier() and os.path.isfile(f"{name}.py"):  # `check port`
        raise ModelError(
            Message("errors.model.file_not_function", model=repr(model), file=repr(f"{name}.py")),
            hint=Message("errors.hint.name_function", module=repr(f"{model}:make")),
        )
    # A hub id has one slash at most.
    if model.startswith((".", "/", "~")) or model.endswith("/") or model.count("/") > 1:
        raise ModelError(
            Message("errors.files.no_directory", model=repr(model)), hint=Message("errors.hint.path_or_id")
        )
    if model.lower().endswith(FILE_SUFFIXES):
        raise ModelError(Message("errors.files.no_file", model=repr(model)), hint=Message(DIRECTORY_OR_CONFIG_HINT))
    return None


def _names_model_type(path: Path) -> bool:
    """Return whether a file is a transformers config: JSON that names the type of its model.

    Raises:
        ModelError: See `sqrtdk.models.config.read_json`, or the file can't be read.
    """
    if path.suffix.lower() != ".json":
        return False
    try:
        return isinstance(read_json(path).get("model_type"), str)
    except OSError as error:
        raise ModelError(
            Message("errors.files.unreadable", path=repr(str(path)), reason=_files.os_reason(error)),
            hint=Message("errors.hint.permissions"),
        ) from error


def locate(model: str, revision: str | None, *, weights: bool, trust_remote_code: bool) -> tuple[str, Path]:
    """Return where a model is.

    Args:
        model: MODEL argument: a directory, a config, or an id of the hub, which is downloaded.
        revision: Of a model on the hub.
        weights: Whether its weights are needed.
        trust_remote_code: Whether its Python files may be downloaded.

    Returns:
        "directory", "config" or "hub"; and the local path to read from.

    Raises:
        ModelError: See `find_local` and `sqrtdk.models.hub.fetch`.
        MissingExtraError: See `sqrtdk.models.hub.fetch`.
    """
    home = find_local(model)
    if home is not None:
        return "config" if home.is_file() else "directory", home
    return "hub", hub.fetch(model, revision=revision, weights=weights, trust_remote_code=trust_remote_code)


def is_address(name: str) -> bool:
    """Return whether a name is the address of a server.

    Example:
        >>> is_address("http://127.0.0.1:8000/v1"), is_address("org/model")
        (True, False)
    """
    return name.lower().startswith(("http://", "https://"))


def check_name(model: str, revision: str | None, announce: Callable[[str], None]) -> None:
    """Refuse a name that no model has, quickly: before torch and transformers are imported.

    Args:
        model: A MODEL argument.
        revision: Branch, tag or commit of a hub id.
        announce: Called with a name without a slash that is not a directory, before the hub is asked.

    Raises:
        ModelError: See `find_local` and `sqrtdk.models.hub.ask_ahead`.
        MissingExtraError: huggingface_hub is missing.
    """
    if is_demo(model) or calls_factory(model):
        return
    if graph_kind(model) is not None or ggml_kind(model) is not None:
        if not os.path.isfile(os.path.expanduser(model)):
            raise ModelError(Message("errors.files.no_file", model=repr(model)), hint=Message("errors.hint.graph_path"))
        return
    if find_local(model) is None:
        hub.ask_ahead(model, revision, lambda: None if "/" in model else announce(model))

"""The files that a report names: where they lie, seen from the root of the repository."""

from __future__ import annotations

import contextlib
import filecmp
import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import CodeType
from typing import Any

from sqrtdk.audit.config_lines import config_file, model_type_line, read_lines
from sqrtdk.audit.configs import field
from sqrtdk.audit.places import each
from sqrtdk.audit.records import Finding, JudgedCall, ModelInfo, Source
from sqrtdk.models.checkpoint import config_path
from sqrtdk.models.records import LoadedModel
from sqrtdk.tracing.records import AttentionCall, NotAttention, NotMeasured
from sqrtdk.tracing.watch.places import file_of, first_line, is_installed

_COPIES = "transformers_modules"


def root() -> str:
    """The nearest directory, from the working directory upwards, that holds `.git`; the working directory if none."""
    try:
        here = Path(os.path.realpath(os.getcwd()))
    except OSError:  # it is gone
        return ""
    return str(next((folder for folder in (here, *here.parents) if (folder / ".git").exists()), here))


def sources(
    loaded: LoadedModel,
    calls: Iterable[JudgedCall],
    findings: Iterable[Finding],
    missed: Iterable[NotMeasured | NotAttention],
) -> tuple[Source, ...]:
    """Where the files lie that the records of a run name, each once, those that are known."""
    top = root()
    config = {} if loaded.home is None else {config_file(loaded.home): str(config_path(loaded.home))}
    texts = (
        named_at(loaded),
        *(at for judged in calls for at in (*_of_call(judged.call), judged.declared_at)),
        *(entry.at for entry in (*findings, *missed)),
    )
    files = dict.fromkeys(file for text in texts for file, _ in each(text))
    found = ((file, config.get(file) or _in_directory(file_of(file), loaded.home)) for file in files)
    return tuple(_source(file, path, top) for file, path in found if path is not None)


def at_file(model: ModelInfo, known: tuple[Source, ...], path: str) -> tuple[ModelInfo, tuple[Source, ...]]:
    """What was audited, and the sources, where that is one file without lines: an exported graph."""
    stand_in = {file for file, _ in each(model.at)}
    name = os.path.basename(path)
    others = tuple(source for source in known if source.file not in stand_in)
    return replace(model, at=f"{name}:1"), (*others, _source(name, os.path.abspath(path), root()))


def _in_directory(file: str | None, directory: Path | None) -> str | None:
    """The file of a model's directory that a file is a copy of: transformers runs its code from copies."""
    if file is None or directory is None or _COPIES not in Path(file).parts:
        return file
    own = directory / Path(file).name
    with contextlib.suppress(OSError):
        if filecmp.cmp(own, file, shallow=False):
            return str(own)
    return file


def _source(file: str, path: str, top: str) -> Source:
    real = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))  # a link lies where it lies
    if top and not is_installed(real) and real.startswith(top.rstrip(os.sep) + os.sep):
        return Source(file, os.path.relpath(real, top).replace(os.sep, "/"), "root")
    if not os.path.isabs(file) and file_of(file) == path:
        return Source(file, file, "packages")
    return Source(file, real.replace(os.sep, "/"), "elsewhere")


def _of_call(call: AttentionCall) -> Iterable[str | None]:
    return (call.product_at, call.softmax_at, *(factor.at for factor in call.scale.factors))


def named_at(loaded: LoadedModel) -> str | None:
    """File and line of what was audited: the config's model type, the factory, the class of the module."""
    if loaded.home is not None:
        return f"{config_file(loaded.home)}:{model_type_line(read_lines(loaded.home)) or 1}"
    code = _factory(loaded.id) if loaded.kind == "factory" else None
    code = code or field(type(loaded.module), "forward.__code__")
    return first_line(code) if isinstance(code, CodeType) else None


def _factory(name: str) -> Any:
    """The code of the function `package.module:factory`, or None if it is a class or an object."""
    module, _, attribute = name.partition(":")
    return field(sys.modules.get(module), f"{attribute}.__code__")

"""Files and lines that a report names, of findings and of config.json fields, and the places of these files."""

from __future__ import annotations

import contextlib
import filecmp
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType

from sqrtdk.audit.configs import field
from sqrtdk.audit.records import Finding, JudgedCall, SourceFile
from sqrtdk.errors import ModelError
from sqrtdk.messages import Message
from sqrtdk.models.checkpoint import config_path
from sqrtdk.models.config import MAX_CONFIG_BYTES
from sqrtdk.models.limits import read_bytes
from sqrtdk.models.records import LoadedModel
from sqrtdk.tracing.records import AttentionCall, NotAttention, NotMeasured
from sqrtdk.tracing.tape.places import file_of, first_line, is_installed


def of_scale(call: AttentionCall, mistake: str | None = None) -> str | None:
    """Return the source lines that compute a call's scale, "myport.py:14, myport.py:20", or None if they are unknown.

    These are the lines of its factors. Without any, it is the line of the product of q and k, or else of the softmax.

    Args:
        call: The attention.
        mistake: The mistake of its scale; for "missing" the product's line is returned, where the factor belongs.
    """
    factors = () if mistake == "missing" else (factor.at for factor in call.scale.factors)
    return join_lines(factors) or call.product_at or call.softmax_at


def of_loss(call: AttentionCall) -> str | None:
    """Return file and line of the steps that could not be followed; of the scale if all were followed."""
    return join_lines(stage.at or call.softmax_at for stage in call.stages if stage.name == "unknown") or of_scale(call)


def join_lines(texts: Iterable[str | None], by: str = ", ") -> str | None:
    """Join texts such as "myport.py:14", each once and in order; return None if all are None or empty.

    Args:
        texts: The texts.
        by: The separator.
    """
    return by.join(dict.fromkeys(text for text in texts if text)) or None


def split_lines(at: str | None) -> tuple[tuple[str, int], ...]:
    """Return the files and lines of a text made by `join_lines`: "a.py:3, b c.py:14"."""
    return tuple((file, int(line)) for file, line in re.findall(r"(?s)(.+?):(\d{1,9})(?:, |\Z)", at or ""))


KeyPath = tuple[str, ...]  # keys from the outermost object inwards
Lines = Mapping[KeyPath, int]

_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[][{}:,\n]|[^][{}:,"\s]+')


def field_lines(text: str) -> dict[KeyPath, int]:
    r"""Return the 1-based line of every key of a JSON document's nested objects; objects in lists are skipped.

    Example:
        >>> field_lines('{"a": 1,\n "b": {\n "c": [{"d": 2}]}}')
        {('a',): 1, ('b',): 2, ('b', 'c'): 3}
    """
    lines: dict[KeyPath, int] = {}
    line, depth_in_lists = 1, 0
    keys: list[str] = []  # keys that lead to the innermost open object
    last: str | None = None  # the last string; it is a key if a colon follows
    key: str | None = None
    for token in (found[0] for found in _JSON_TOKEN.finditer(text)):
        if token == "\n":
            line += 1
        elif token in ("[", "]"):
            depth_in_lists += 1 if token == "[" else -1
        elif depth_in_lists:
            continue
        elif token == "{":
            keys.append(key or "")
        elif token == "}":
            keys.pop()
        elif token == ":" and last is not None:
            key = json.loads(last)
            path = (*keys[1:], key)
            lines[path] = line  # of a duplicate name the last counts
        last = token if token.startswith('"') else last if token == "\n" else None
    return lines


def read_lines(home: Path | None) -> dict[KeyPath, int]:
    """Return the lines of a model's config, which is a file or lies in a directory; empty if it can't be read."""
    if home is None:
        return {}
    with contextlib.suppress(OSError, ModelError, ValueError, IndexError):
        path = config_path(home)
        return field_lines(read_bytes(path, path.name, MAX_CONFIG_BYTES).decode("utf-8"))
    return {}


def config_file(home: Path) -> str:
    """Return the path of a model's config as a report shows it."""
    return str(config_path(home)).replace(os.sep, "/")


def declared_at(judged: JudgedCall, home: Path | None, lines: Lines) -> str | None:
    """Return file and line of the config's fields that declare a call's scale, "config.json:12", or None.

    Several are joined by commas. For a field that has its default, it is the line of `model_type`.

    Args:
        judged: The call, with `declared_by`.
        home: The model's config, or the directory that holds it; None if there is none.
        lines: The lines of the config's fields, from `read_lines`.
    """
    if judged.declared_by is None or home is None:
        return None
    fields = config_fields(judged.declared_by)
    by_family = any(sentence.id == "sources.declared.family" for sentence in _sentences(judged.declared_by))
    if not fields and not by_family:
        return None  # an attribute or a norm declares it
    parts = judged.call.site.replace("_", ".").split(".")
    found = (_line(lines, tuple(field.split(".")), parts) or model_type_line(lines, parts) for field in fields or [""])
    return join_lines(f"{config_file(home)}:{line}" for line in found if line)


def config_fields(declared_by: str) -> list[str]:
    """Return the fields of the config that a declaration names; none if a family, an attribute or a norm declares.

    Args:
        declared_by: Of a `JudgedCall`.
    """
    return [str(sentence.values["field"]) for sentence in _sentences(declared_by) if "field" in sentence.values]


def _sentences(text: object) -> Iterator[Message]:
    """Yield a sentence of the catalogue and those inside it."""
    if isinstance(text, Message):
        yield text
        for value in text.values.values():
            yield from _sentences(value)


def model_type_line(lines: Lines, parts: list[str] | None = None) -> int | None:
    """Return the line number of `model_type` in a config file, or None if the file does not have it.

    Args:
        lines: The lines of the config's fields, from `read_lines`.
        parts: Words of a module path; in a composite config, they select the part that the module belongs to.
    """
    return _line(lines, ("model_type",), parts or [])


def _line(lines: Lines, field: KeyPath, parts: list[str]) -> int | None:
    """Return the line of a field: in the sub-config that a site's parts name, else the outermost."""

    # Sub-configs that the path names come first, then the shortest path.
    def rank(path: KeyPath) -> tuple[bool, int]:
        return not any(key.removesuffix("_config") in parts for key in path[: -len(field)]), len(path)

    paths = [path for path in lines if path[-len(field) :] == field]
    return lines[min(paths, key=rank)] if paths else None


_COPIES = "transformers_modules"


def root() -> str:
    """Return the nearest directory that contains `.git`, from the working directory upwards.

    Returns the working directory if there is none, and "" if the working directory was deleted.
    """
    try:
        here = Path(os.path.realpath(os.getcwd()))
    except OSError:  # the directory was deleted
        return ""
    return str(next((folder for folder in (here, *here.parents) if (folder / ".git").exists()), here))


def source_files(
    loaded: LoadedModel,
    calls: Iterable[JudgedCall],
    findings: Iterable[Finding],
    missed: Iterable[NotMeasured | NotAttention],
) -> tuple[SourceFile, ...]:
    """Return the place of every source file that the records of a run name, each once; unknown places are left out.

    Args:
        loaded: The model.
        calls: Its judged attentions.
        findings: The findings of the run.
        missed: Attentions that could not be read, and operations that turned out to be none.
    """
    top = root()
    config = {} if loaded.home is None else {config_file(loaded.home): str(config_path(loaded.home))}
    texts = [named_at(loaded), *(entry.at for entry in (*findings, *missed))]
    for judged in calls:
        call = judged.call
        texts += (call.product_at, call.softmax_at, *(f.at for f in call.scale.factors), judged.declared_at)
    files = dict.fromkeys(file for text in texts for file, _ in split_lines(text))
    found = ((file, config.get(file) or _in_directory(file_of(file), loaded.home)) for file in files)
    return tuple(source_file(file, path, top) for file, path in found if path is not None)


def _in_directory(file: str | None, directory: Path | None) -> str | None:
    """Return the original in a model's directory of a file that transformers runs from a copy, else the file itself."""
    if file is None or directory is None or _COPIES not in Path(file).parts:
        return file
    own = directory / Path(file).name
    with contextlib.suppress(OSError):
        if filecmp.cmp(own, file, shallow=False):
            return str(own)
    return file


def source_file(file: str, path: str, top: str) -> SourceFile:
    """Return the record of a source file, with a path that does not depend on this machine where possible.

    Args:
        file: The name that findings use in `at`.
        path: Where the file lies.
        top: Directory of the repository, or "". A file below it that belongs to no installed package gets a path
            relative to it and the base "root".
    """
    # Only the directory is resolved: a link to a file lies where the link is.
    real = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    if top and not is_installed(real) and real.startswith(top.rstrip(os.sep) + os.sep):
        return SourceFile(file, os.path.relpath(real, top).replace(os.sep, "/"), "root")
    if not os.path.isabs(file) and file_of(file) == path:
        return SourceFile(file, file, "packages")
    return SourceFile(file, real.replace(os.sep, "/"), "elsewhere")


def named_at(loaded: LoadedModel) -> str | None:
    """Return file and line, "file:12", of what was audited, or None if they are unknown.

    It is the line of `model_type` in the config for a model directory, the factory's first line for a factory, and that
    of the class's forward for any other module.
    """
    if loaded.home is not None:
        return f"{config_file(loaded.home)}:{model_type_line(read_lines(loaded.home)) or 1}"
    module, _, function = loaded.id.partition(":") if loaded.kind == "factory" else ("", "", "")
    code = field(sys.modules.get(module), f"{function}.__code__") or field(type(loaded.module), "forward.__code__")
    return first_line(code) if isinstance(code, CodeType) else None

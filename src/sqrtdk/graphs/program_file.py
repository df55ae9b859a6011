"""Finds code in an untrusted file of torch.export that would run when the program is loaded or run.

A .pt2 file is a zip of JSON and raw tensors. torch 2.13 can execute code from it in these ways:

- Special tensors, TorchScript objects and other constants are unpickled without restriction. So are example inputs
  that the restricted unpickler refuses.
- The target of a node may be any attribute below `torch`, `math` or `_operator`, and is called.
- Symbolic sizes are passed to `sympy.sympify`, which evaluates them as Python.
- Guards are Python code that `program.module()` runs by default. Our call switches that off, and `guards` parses them.
- Names of nodes and arguments are written into the source of the module.
- The description of nested inputs may import a module by name.
- Compiled programs in the file are libraries, which are loaded.

A usual model needs only plain operators, sizes and names. These are accepted here, and everything else is refused by
name.
"""

from __future__ import annotations

import ast
import io
import json
import os
import re
import zipfile
from collections.abc import Iterator
from typing import Any

import torch

from sqrtdk.errors import INTERRUPTS, ModelError, kind_and_text, short_text
from sqrtdk.models.limits import check_file

MAX_PT2_BYTES = 2**40
MAX_JSON = 2**29
MAX_ARCHIVE_ENTRIES = 2**18
_TARGET = re.compile(r"torch\.ops\.(aten|prims)\.(\w+)\.(\w+)")
_PLAIN_TARGETS = re.compile(
    r"_operator\.(getitem|add|sub|mul|floordiv|truediv|mod|neg|pow|eq|ne|lt|le|gt|ge|and_|or_|not_)"
    r"|math\.(ceil|floor|sqrt|trunc)|torch\.sym_(int|float|not|max|min|ite|sum)"
    r"|torch\.ops\.higher_order\.(wrap_with_set_grad_enabled|wrap_with_autocast)"
)
_FILE_OPERATORS = ("from_file",)  # ATen operators that open files
_IDENTIFIER = re.compile(r"\w{0,1000}")
_HARMLESS_TEXT = re.compile(r"[\w.,:<>+\-/ ]{0,1000}")
# Names of nodes and arguments become source code, so they are identifiers. Names of tensors may contain dots.
_NAME_PATTERNS = {
    "name": _IDENTIFIER,
    "forward_arg_names": _IDENTIFIER,
    "parameter_name": _HARMLESS_TEXT,
    "buffer_name": _HARMLESS_TEXT,
}
_FUNCTIONS = {"Symbol", "Integer", "Float", "Rational", "Mul", "Add", "Pow", "Max", "Min", "Mod", "Abs", "FloorDiv",
              "CeilDiv", "ModularIndexing", "PythonMod", "CleanDiv", "CeilToInt", "FloorToInt", "TruncToInt", "ToFloat",
              "IntTrueDiv", "PowByNatural", "IsNonOverlappingAndDenseIndicator", "Equality", "Unequality", "LessThan",
              "StrictLessThan", "GreaterThan", "StrictGreaterThan", "And", "Or", "Not", "Piecewise",
              "ExprCondPair", "OpaqueUnaryFn_sqrt", "Identity"}  # fmt: skip
_SYMPY_CONSTANTS = {"true", "false", "oo", "int_oo"}
_GRAMMAR = (ast.Expression, ast.Call, ast.Name, ast.Load, ast.Constant, ast.keyword, ast.BinOp, ast.UnaryOp,
            ast.Compare, ast.operator, ast.unaryop, ast.cmpop)  # fmt: skip
_PLAIN_NESTING = re.compile(r"__enum__|collections\.defaultdict")
_OPEN_TEXT = {"metadata", "as_string", "as_strings", "torch_version", "guards_code"}  # free text that is never executed


def refuse_code(path: str | os.PathLike[str]) -> None:
    """Check that a `.pt2` file contains no code but torch's own operators.

    Raises:
        ModelError: Loading or running it would execute anything else, or it is not such a file.
    """
    shown = str(path)[:200]
    try:
        check_file(os.fspath(path), f"the program {shown!r}", MAX_PT2_BYTES)
        with zipfile.ZipFile(path) as archive:
            _check(archive)
    except (*INTERRUPTS, ModelError):
        raise
    except OSError as error:
        raise ModelError(f"can't read the program {shown!r}: {short_text(error)}", hint="Check the path.") from error
    except Exception as error:  # zip and JSON raise many types for a damaged or deeply nested file
        raise ModelError(
            f"{shown!r} is not a file of torch.export.save: {kind_and_text(error)}",
            hint="Write it with torch.export.save(program, 'model.pt2').",
        ) from error


def _refuse(what: str) -> ModelError:
    return ModelError(
        f"the program {what}: loading it could run code of its author",
        hint="If you trust the file, pass --trust-remote-code.",
    )


def _check(archive: zipfile.ZipFile) -> None:
    """Check all files of the archive of a program.

    Raises:
        ModelError: One holds code or a pickle of unknown objects, or the archive is of another form.
    """
    entries = archive.infolist()
    names = [entry.filename for entry in entries]
    if len(entries) > MAX_ARCHIVE_ENTRIES or len(set(names)) < len(names):
        raise ModelError(f"the program has {len(names)} files, or two of one name", hint="Export it again.")
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise ModelError("the program is compressed, which torch.export.save does not do", hint="Export it again.")
    tops = {name.partition("/")[0] for name in names}
    if len(tops) != 1 or not any(name.endswith("/archive_version") for name in names):
        raise _refuse("is of an older format, which is a pickle")
    for name in names:
        inner = name.partition("/")[2]
        if inner.startswith("models/") and inner.endswith(".json"):
            _check_graph(json.loads(_read(archive, name)))
        elif inner.startswith(("data/weights/", "data/constants/")) and inner.endswith(".json"):
            _check_payload(json.loads(_read(archive, name)))
        elif inner.startswith("data/sample_inputs/"):
            _check_pickle(_read(archive, name))
        elif inner.endswith((".pt", ".so", ".cpp", ".o")) or inner.startswith("data/aotinductor"):
            raise _refuse(f"holds {inner[:100]!r}")


def _read(archive: zipfile.ZipFile, name: str) -> bytes:
    if archive.getinfo(name).file_size > MAX_JSON:
        raise ModelError(f"{name[:100]!r} of the program is over {MAX_JSON} bytes", hint="Export a smaller program.")
    return archive.read(name)


def _check_pickle(content: bytes) -> None:
    """Raises a `ModelError` unless the restricted unpickler accepts the example inputs.

    Accepted content holds only tensors and plain containers, so that the unrestricted one is safe with it as well.
    """
    try:
        if content:
            torch.load(io.BytesIO(content), weights_only=True)
    except INTERRUPTS:
        raise
    except Exception as error:
        raise _refuse(f"holds example inputs that are no plain tensors ({kind_and_text(error, 120)})") from error


def _check_payload(config: Any) -> None:
    for name, entry in config["config"].items():
        if entry["use_pickle"] or not re.fullmatch(r"(weight|tensor)_\d+", entry["path_name"]):
            raise _refuse(f"holds {name[:100]!r} as a pickled object")
        if not _HARMLESS_TEXT.fullmatch(name):
            raise _refuse(f"has a tensor named {name[:60]!r}")


def _check_graph(program: Any) -> None:
    for path, text in _texts(program, ()):
        key = next((part for part in reversed(path) if isinstance(part, str)), "")
        if key in ("target", "as_operator"):
            _check_target(text)
        elif key == "expr_str":
            _check_expression(text)
        elif key in ("in_spec", "out_spec"):
            if _PLAIN_NESTING.search(text):
                raise _refuse("nests its inputs or outputs in what is imported by name")
        elif not _OPEN_TEXT & set(path) and not _HARMLESS_TEXT.fullmatch(text):
            raise _refuse(f"has {text[:60]!r} as its {key[:60]}")
        elif key in _NAME_PATTERNS and not _NAME_PATTERNS[key].fullmatch(text):
            raise _refuse(f"names something {text[:60]!r}")


def _texts(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield every string of a JSON document, keys included, with its path."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            # The keys of `tensor_values` are names of tensors in the program's source.
            if "metadata" not in path and path[-1:] != ("treespec_namedtuple_fields",):
                yield (*path, "name") if path[-1:] == ("tensor_values",) else (*path, "key"), key
            yield from _texts(inner, (*path, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _texts(inner, (*path, i))


def _check_target(target: str) -> None:
    if _PLAIN_TARGETS.fullmatch(target):
        return
    match = _TARGET.fullmatch(target)
    if match is not None and match[2] not in _FILE_OPERATORS:
        packet: Any = getattr(getattr(torch.ops, match[1]), match[2], None)
        if isinstance(packet, torch._ops.OpOverloadPacket) and match[3] in packet.overloads():  # type: ignore[no-untyped-call]
            return
    raise _refuse(f"calls {target[:100]!r}")


def _check_expression(text: str) -> None:
    """Raises a `ModelError` unless a size consists of sympy functions, numbers and symbols: "2*s0 + 1"."""
    tree = ast.parse(text, mode="eval")
    for node in ast.walk(tree):
        known = isinstance(node, _GRAMMAR)
        if isinstance(node, ast.Name):
            known = node.id in _FUNCTIONS | _SYMPY_CONSTANTS or re.fullmatch(r"z?[a-z]{1,3}\d+", node.id) is not None
        elif isinstance(node, ast.Call):
            known = isinstance(node.func, ast.Name)
        elif isinstance(node, ast.Constant):
            known = not isinstance(node.value, str) or _IDENTIFIER.fullmatch(node.value) is not None
        if not known:
            raise _refuse(f"computes a size by {text[:80]!r}")

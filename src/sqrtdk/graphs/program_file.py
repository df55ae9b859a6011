"""A file of torch.export from a stranger: what in it would run code when it is loaded, or run.

What torch 2.13 does with a .pt2 file, which is a zip of JSON and of tensors' bytes:

- Tensors that are not plain, and TorchScript's and other objects among the constants, are unpickled without
  restriction; the example inputs are, where the restricted reader refuses them.
- The target of a node is any attribute below `torch`, `math` or `_operator`, and is called.
- Sizes that are expressions are given to `sympy.sympify`, which evaluates them as Python.
- Guards are Python code, which `program.module()` runs unless it is told not to: here it is, and `guards` reads them.
  Names of nodes and arguments are written into the source of the module.
- The description of the inputs' nesting may import a module by its name.
- Compiled programs in the file are libraries that are loaded.

What `torch.export.save` writes of a usual model needs none of this beyond plain operators, sizes and names, and that is
what is let through here: everything else is refused by name.
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

MAX_BYTES = 2**40
MAX_JSON = 2**29
MAX_ENTRIES = 2**18
_TARGET = re.compile(r"torch\.ops\.(aten|prims)\.(\w+)\.(\w+)")
_PLAIN_TARGETS = re.compile(
    r"_operator\.(getitem|add|sub|mul|floordiv|truediv|mod|neg|pow|eq|ne|lt|le|gt|ge|and_|or_|not_)"
    r"|math\.(ceil|floor|sqrt|trunc)|torch\.sym_(int|float|not|max|min|ite|sum)"
    r"|torch\.ops\.higher_order\.(wrap_with_set_grad_enabled|wrap_with_autocast)"
)
_FILE_OPERATORS = ("from_file",)  # ATen's own that touch files
_NAME = re.compile(r"\w{0,1000}")
_TEXT = re.compile(r"[\w.,:<>+\-/ ]{0,1000}")
# Names of nodes and arguments are written into code; those of tensors have dots.
_NAMES = {"name": _NAME, "forward_arg_names": _NAME, "parameter_name": _TEXT, "buffer_name": _TEXT}
_FUNCTIONS = {"Symbol", "Integer", "Float", "Rational", "Mul", "Add", "Pow", "Max", "Min", "Mod", "Abs", "FloorDiv",
              "CeilDiv", "ModularIndexing", "PythonMod", "CleanDiv", "CeilToInt", "FloorToInt", "TruncToInt", "ToFloat",
              "IntTrueDiv", "PowByNatural", "IsNonOverlappingAndDenseIndicator", "Equality", "Unequality", "LessThan",
              "StrictLessThan", "GreaterThan", "StrictGreaterThan", "And", "Or", "Not", "Piecewise",
              "ExprCondPair", "OpaqueUnaryFn_sqrt", "Identity"}  # fmt: skip
_VALUES = {"true", "false", "oo", "int_oo"}
_GRAMMAR = (ast.Expression, ast.Call, ast.Name, ast.Load, ast.Constant, ast.keyword, ast.BinOp, ast.UnaryOp,
            ast.Compare, ast.operator, ast.unaryop, ast.cmpop)  # fmt: skip
_PLAIN_NESTING = re.compile(r"__enum__|collections\.defaultdict")
_OPEN_TEXT = {"metadata", "as_string", "as_strings", "torch_version", "guards_code"}  # never run, and not names


def refuse_code(path: str | os.PathLike[str]) -> None:
    """Refuse, by a `ModelError`, a file that would run other code than torch's operators when it is loaded or run."""
    shown = str(path)[:200]
    try:
        check_file(os.fspath(path), f"the program {shown!r}", MAX_BYTES)
        with zipfile.ZipFile(path) as archive:
            _check(archive)
    except (*INTERRUPTS, ModelError):
        raise
    except OSError as error:
        raise ModelError(f"can't read the program {shown!r}: {short_text(error)}", hint="Check the path.") from error
    except Exception as error:  # whatever zip, JSON and their nesting make of a damaged file
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
    entries = archive.infolist()
    names = [entry.filename for entry in entries]
    if len(entries) > MAX_ENTRIES or len(set(names)) < len(names):
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
    """What the restricted reader takes is built of tensors and plain containers, whoever reads it then."""
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
        if not _TEXT.fullmatch(name):
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
        elif not _OPEN_TEXT & set(path) and not _TEXT.fullmatch(text):
            raise _refuse(f"has {text[:60]!r} as its {key[:60]}")
        elif key in _NAMES and not _NAMES[key].fullmatch(text):
            raise _refuse(f"names something {text[:60]!r}")


def _texts(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """All texts of a document with where they stand; the keys of its objects are texts too."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
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
    """Sizes are calls of sympy's functions on numbers and symbols."""
    tree = ast.parse(text, mode="eval")
    for node in ast.walk(tree):
        known = isinstance(node, _GRAMMAR)
        if isinstance(node, ast.Name):
            known = node.id in _FUNCTIONS | _VALUES or re.fullmatch(r"z?[a-z]{1,3}\d+", node.id) is not None
        elif isinstance(node, ast.Call):
            known = isinstance(node.func, ast.Name)
        elif isinstance(node, ast.Constant):
            known = not isinstance(node.value, str) or _NAME.fullmatch(node.value) is not None
        if not known:
            raise _refuse(f"computes a size by {text[:80]!r}")

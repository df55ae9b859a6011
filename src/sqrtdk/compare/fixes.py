"""What to change in B for a cause: the call, the argument or the key of a config (`messages/words/fixes.toml`).

A fix is found by the name of the cause and its codes, most particular first ("padding.on_rows"), else "set" or "drop".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sqrtdk.audit.tolerance import inverse_root, is_close
from sqrtdk.audit.written import written_root
from sqrtdk.compare.inside.suspect import NO_VALUE
from sqrtdk.compare.records import Cause
from sqrtdk.messages import Message, catalogue_text, placeholders
from sqrtdk.messages._catalogue import topic

# sentences whose fix is that of another one; a key here is read before the catalogue
_SAME_FIX = {
    "scale.at_place": "scale.factors",
    "scale.range_by": "scale.factors",
    "padding.rows_see_all": "padding.rows",
    "padding.rows_see_own": "padding.rows",
    "padding.rows_see_none": "padding.rows",
    "padding.rows_no_longer": "padding.rows",
    "mask.inverts": "padding.inverts",
    "mask.of_others": "padding.of_others",
    "mask.own": "padding.own",
    "mask.documents.moved": "mask.documents.lost",
    "mask.chunks.moved": "mask.chunks.lost",
    "mask.prefix.moved": "mask.prefix.lost",
    "mask.blocks.moved": "mask.blocks.lost",
    "weights.gain_shift": "weights.gain",
    "positions.twice_beside": "positions.twice_not_once",
    "positions.cache_twice": "positions.cache_turned",
}
_NORMS = {"RMS": "nn.RMSNorm", "LayerNorm": "nn.LayerNorm", "L2": "F.normalize"}  # by the word for what A has


def fix_of(cause: Cause) -> Message | None:
    """Return what to change in B to remove a cause.

    None is returned for a changed input, for an unknown cause, if the change was tried on B's program and did not help,
    and if the catalogue has no advice for it.

    Example:
        >>> fix_of(Cause("softcap", None, 50.0, 1.0, "has a softcap (50), which A has not", "softcap"))
        'take the tanh out; attn_logit_softcapping=None in a Gemma 2 config'
    """
    if not cause.mends:
        return None
    if (code := _written_scale(cause)) is not None:
        return Message("fixes.scale.written", now=code[0], right=code[1])
    known, values = topic("fixes"), _values(cause)
    for key in _keys(cause):
        key = _SAME_FIX.get(key, key)
        if key in known and (names := placeholders(catalogue_text(f"fixes.{key}").en)) <= values.keys():
            fix = Message(f"fixes.{key}", **{name: values[name] for name in sorted(names)})
            return worded(fix, cause.name, cause.written, values)
    return None


def _written_scale(cause: Cause) -> tuple[str, str] | None:
    """Return the root in B's line of the scale, and the root that A's scale is; None if A's is that of no whole number.

    A line of B's own code is read where B ran in this process.
    """
    if cause.name != "scale" or not (isinstance(cause.a, float) and isinstance(cause.b, float) and cause.a > 0):
        return None
    size = round(cause.a**-2)
    return written_root(cause.at_b, size) if size > 1 and is_close(cause.a, inverse_root(size)) else None


def worded(fix: Message, name: str, written: str, values: Mapping[str, Any] | None = None) -> Message:
    """Return the sentence that names the keys of what B is, if the catalogue has one; else the fix itself.

    Args:
        fix: a fix of the catalogue, "fixes.rope_base.set".
        name: name of the cause.
        written: what B is, as `Cause.written` has it: "gguf llama" gives "fixes.rope_base.set_gguf".
        values: what the sentence may name; None for the values of the fix.
    """
    kind, _, architecture = written.partition(" ")
    values = {**(fix.values if values is None else values), "arch": architecture}
    own = fix.id.removeprefix("fixes.")
    for key in _framed((f"{name}.{own.rpartition('.')[2]}", own), kind):
        names = placeholders(catalogue_text(f"fixes.{key}").en)
        if names <= values.keys():
            return Message(f"fixes.{key}", **{name: values[name] for name in sorted(names)})
    return fix


def _framed(keys: Sequence[str], kind: str) -> Iterator[str]:
    """Yield the keys of the catalogue for a kind of side; a file has the words of a port where it has none of its own.

    Example:
        >>> list(_framed(("scale.factors", "scale.factors"), "gguf"))[:1]
        ['scale.factors_port']
    """
    for ending in {"gguf": ("gguf", "port"), "port": ("port",)}.get(kind, ()):
        yield from (key for one in keys if (key := f"{one}_{ending}") in topic("fixes"))


def written_as(framework: str, architecture: str) -> str:
    """Return what a side is: "gguf" with the architecture of the file, "port", or "" for a module of torch.

    Args:
        framework: `SideInfo.framework`.
        architecture: `SideInfo.module_class`, which is the architecture of a file.

    Example:
        >>> written_as("JAX 0.10.2", "model"), written_as("llama-cpp-python 0.3.36", "llama"), written_as("", "GPT")
        ('port', 'gguf llama', '')
    """
    return "" if not framework else "port" if framework.startswith(("JAX", "MLX")) else f"gguf {architecture}"


def _keys(cause: Cause) -> Iterator[str]:
    yield from (f"{cause.name}.{code}" for code in cause.codes)
    if cause.lacks == "a" or cause.a is None:
        yield f"{cause.name}.drop"
    yield f"{cause.name}.set"


def _values(cause: Cause) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, word in (("a", cause.a), ("b", cause.b)):
        shown = Message(NO_VALUE) if word is None else word
        values[name] = f"{shown:.6g}" if isinstance(shown, float) else shown
    for text in (cause.b, cause.text):  # the sentence has a number with its unit, or in more digits
        if isinstance(text, Message):
            values |= text.values
    if isinstance(cause.a, float | int):
        values["diagonal"] = f"{-cause.a:g}"
        if isinstance(cause.b, float | int) and cause.b:
            values["ratio"] = f"{cause.a / cause.b:.6g}"
    if cause.a in _NORMS:
        values["module"] = _NORMS[cause.a]
    return values

"""Records of a trace file: its content when read, and its description when written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from sqrtdk.tracing.records import NotMeasured
from sqrtdk.tracing.tensors import CallTensors


@dataclass(frozen=True, slots=True)
class TraceMetadata:
    """Who wrote a trace file, and of which model.

    Attributes:
        writer: program and version, "sqrtdk 0.1.0"; "" if the file does not say.
        model: the name it was loaded by: "demo", "org/name".
        module_class: class name of the model.
        dtype: dtype of its parameters, "float32".
        device: device that it ran on.
        attn: implementation of attention, if the model reports it.
        packages: package -> version.
        not_measured: attentions that ran but are not in the file, with reasons.
    """

    writer: str = ""
    model: str = ""
    module_class: str = ""
    dtype: str = ""
    device: str = ""
    attn: str | None = None
    packages: Mapping[str, str] = field(default_factory=dict)
    not_measured: tuple[NotMeasured, ...] = ()


@dataclass(frozen=True, slots=True)
class Cut:
    """Which part of the attention that ran is in the file: its first rows, some of its query heads.

    Attributes:
        rows: number of rows in the file, from the first on; None if all are.
        rows_of: number of rows that ran.
        heads: numbers of the query heads in the file, in order; None if all are.
        heads_of: number of query heads that ran.
    """

    rows: int | None = None
    rows_of: int | None = None
    heads: tuple[int, ...] | None = None
    heads_of: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TraceFile:
    """A trace file as it was read.

    Attributes:
        path: path of the file.
        schema_version: version of the format.
        metadata: who wrote it, and of which model.
        calls: in the order of the file.
        cuts: parallel to `calls`; None for a call that is whole.
        model_inputs: the model's input tensors by argument of forward; a tuple's by "0", "1", ... Empty if the file has
            none.
        notes: sentences on oddities that are not errors, such as NaN.
    """

    path: Path
    schema_version: int
    metadata: TraceMetadata
    calls: tuple[CallTensors, ...]
    cuts: tuple[Cut | None, ...]
    model_inputs: Mapping[str, Tensor] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Recording:
    """A trace file that was written.

    Attributes:
        path: path of the file.
        calls: number of calls in it.
        bytes: size of the file.
        metadata: the file's metadata.
        notes: sentences on choices that were made and things left out.
    """

    path: Path
    calls: int
    bytes: int
    metadata: TraceMetadata
    notes: tuple[str, ...] = ()

"""What is read from a trace file, and what is said of one that was written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from sqrtdk.tracing.records import NotMeasured
from sqrtdk.tracing.tensors import CallTensors


@dataclass(frozen=True, slots=True)
class TraceMetadata:
    """Who wrote a trace file, and of what.

    Attributes:
        writer: program and version, "sqrtdk 0.1.0"; "" where the file does not say.
        model: as it was named: "demo", "org/name".
        module_class: class name of the model.
        dtype: of its parameters, "float32".
        device: where it ran.
        attn: implementation of attention, where the model says it.
        packages: versions, by name.
        not_measured: what ran and is not in the file, and why.
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
    """What a call in a file is of the attention that ran: its first rows, some of its query heads.

    Attributes:
        rows: how many are in the file, from the first on; None: all.
        rows_of: how many ran.
        heads: numbers of the query heads in the file, in order; None: all.
        heads_of: how many ran.
    """

    rows: int | None = None
    rows_of: int | None = None
    heads: tuple[int, ...] | None = None
    heads_of: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TraceFile:
    """A trace file as it was read.

    Attributes:
        path: of the file.
        schema_version: of its format.
        metadata: who wrote it, and of what.
        calls: in the order of the file.
        cuts: parallel to `calls`; None for a call that is whole.
        model_inputs: the tensors that the model was given, by the names of forward's arguments; those of a tuple by
            "0", "1", ...; empty where the file has none.
        notes: sentences on what is odd but no error: NaN, infinity.
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
        path: of the file.
        calls: how many it holds.
        bytes: its size.
        metadata: as in the file.
        notes: sentences on what was decided or left out.
    """

    path: Path
    calls: int
    bytes: int
    metadata: TraceMetadata
    notes: tuple[str, ...] = ()

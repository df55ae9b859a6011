"""Records of a trace file: its content when read, and its description when written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from msgspec import Meta
from torch import Tensor

from sqrtdk.recording.limits import MAX_RANGES, MAX_SIDE, at_most, quote, refuse_file
from sqrtdk.tracing.records import NotMeasured
from sqrtdk.tracing.tensors import CallTensors

Ranges = Annotated[tuple[tuple[int, ...], ...], Meta(min_length=1, max_length=MAX_RANGES)]
Bounds = tuple[int | None, int | None]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Which part of an attention over several ranks a file holds.

    Places are ranges of numbers, each (first, after the last) or (first, after the last, step), in the order of the
    tensors: ((8, 16),) is the second half of 16, ((0, 4), (12, 16)) zigzag, ((1, 16, 4),) striped.

    Attributes:
        rows: of q and the output; None: all.
        rows_of: number of rows on all ranks; None if `rows` is.
        keys: of k and v; None: all.
        keys_of: number of keys on all ranks.
        heads: of q; None: all. Key heads are those that they read.
        heads_of: number of query heads on all ranks.
    """

    rows: Ranges | None = None
    rows_of: int | None = None
    keys: Ranges | None = None
    keys_of: int | None = None
    heads: Ranges | None = None
    heads_of: int | None = None

    def places(self, axis: str, count: int) -> tuple[list[int], int]:
        """Return the places along "rows", "keys" or "heads", and how many there are on all ranks.

        Args:
            axis: the name of the field.
            count: number of them in the file.

        Raises:
            TraceFileError: The ranges are not as many numbers, or beyond the number on all ranks.

        Example:
            >>> Shard(rows=((0, 2), (6, 8)), rows_of=8).places("rows", 4)
            ([0, 1, 6, 7], 8)
        """
        ranges, of = getattr(self, axis), getattr(self, f"{axis}_of")
        if ranges is None and of is None:
            return list(range(count)), count
        if ranges is None or of is None:
            refuse_file(f"a shard has '{axis}' without '{axis}_of', or the other way round", "Give both, or neither.")
        at_most(of, MAX_SIDE, f"{axis} of all ranks")
        for each in ranges:
            if len(each) not in (2, 3) or not 0 <= each[0] < each[1] <= of or (len(each) == 3 and each[2] < 1):
                refuse_file(
                    f"{axis} {quote(list(each))} of {of} in a shard are no range",
                    "[first, after the last], or with a step as the third number.",
                )
        if sum(len(range(*each)) for each in ranges) != count:
            refuse_file(
                f"the {axis} of a shard, {quote([list(each) for each in ranges])}, are not the {count} of its tensors",
                "Declare the place of each row, key and head that the file holds.",
            )
        places = [place for each in ranges for place in range(*each)]
        if len(set(places)) < len(places):
            refuse_file(f"the {axis} of a shard name a place twice", "Each place once, in the order of the tensors.")
        return places, of


@dataclass(frozen=True, slots=True, eq=False)
class TraceFile:
    """A trace file as it was read.

    Attributes:
        path: path of the file.
        schema_version: version of the format.
        metadata: who wrote it, and of which model.
        calls: in the order of the file.
        cuts: parallel to `calls`; None for a call that is whole.
        shards: parallel to `calls`, which part of it this rank had; None for a call of one process.
        bounds: parallel to `calls`: for each of its terms the bounds (least, greatest) of i - j over all ranks, which a
            mask of a rank is declared by; None for another term.
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
    shards: tuple[Shard | None, ...] = ()
    bounds: tuple[tuple[Bounds | None, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class RankRows:
    """The part of a call's output that one rank computed: its file, its query heads and its rows."""

    name: str
    heads: tuple[int, ...]
    rows: tuple[int, ...]


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

"""The three tables of some steps, and one Parquet file that holds them as a unit.

The file has the columns of all three, and `table`, which says of each row whose it is; the rest of its row is null. A
file that comes from a stranger is held to the schema, to the codec that is written (snappy can't swell far beyond the
size of the file, unlike others) and to limits, before anything is made of it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sqrtdk import _extras
from sqrtdk.errors import InvalidValueError, RunFolderError, kind_and_text, short_text
from sqrtdk.monitor.columns import TABLES

Row = Mapping[str, object]
Table = Any  # a pyarrow.Table; pyarrow has no types
MAX_ROWS = 2**20  # of a part
MAX_TEXT = 10_000  # bytes of one text
MAX_BYTES = 2**26  # of a part, unpacked
MAX_FILE_BYTES = 2 * MAX_BYTES
_CODEC = "SNAPPY"
_ALL = {column.name: column for columns in TABLES.values() for column in columns}
_TEXTS = ("table", *(name for name, column in _ALL.items() if column.type == "string"))


def arrow(name: str = "pyarrow") -> Any:
    """Import pyarrow, or a part of it.

    Raises:
        MissingExtraError: It is not installed.

    Example:
        >>> arrow().__name__
        'pyarrow'
    """
    return _extras.load(name, extra="watch")


@dataclass(frozen=True, slots=True)
class Tables:
    """Rows of `columns.HEADS`, `columns.STEPS` and `columns.ALARMS`, each a pyarrow table in order of step."""

    heads: Table
    steps: Table
    alarms: Table

    def __len__(self) -> int:
        return sum(table.num_rows for table in (self.heads, self.steps, self.alarms))

    def between(self, first: int, last: int | None) -> Tables:
        """The rows of the steps from `first` to `last`, both included; None: to the end."""

        def rows(table: Table) -> Table:
            start, stop = np.searchsorted(_steps(table), [first, first if last is None else last + 1])
            return table.slice(start, (table.num_rows if last is None else max(start, stop)) - start)

        return Tables(rows(self.heads), rows(self.steps), rows(self.alarms))


@functools.cache
def schema(table: str) -> Any:
    """The Arrow schema of a table of `columns.TABLES`.

    Example:
        >>> schema("alarms").field("head").type, schema("alarms").field("name").nullable
        (DataType(int32), False)
    """
    fields = [arrow().field(column.name, _type(column.type), column.nullable) for column in TABLES[table]]
    return arrow().schema(fields)


def _type(name: str) -> Any:
    return arrow().type_for_alias(name)


@functools.cache
def _file_schema(texts: str = "string") -> Any:
    """Of a file; what is null in the rows of another table is so for all that the table asks of its own rows."""
    pa = arrow()
    kinds = {"string": pa.string(), "dictionary": pa.dictionary(pa.int32(), pa.string())}
    fields = [pa.field("table", kinds[texts], nullable=False)]
    for name, column in _ALL.items():
        kind = kinds[texts] if column.type == "string" else _type(column.type)
        fields.append(pa.field(name, kind, nullable=name != "step"))
    return pa.schema(fields)


def from_rows(heads: Sequence[Row], steps: Sequence[Row], alarms: Sequence[Row]) -> Tables:
    """Tables of rows.

    Args:
        heads: one a head of a call at a sampled step; a nullable column may be left out.
        steps: one a step, in any order, each step once.
        alarms: likewise.

    Raises:
        InvalidValueError: A column is unknown or missing, a value does not fit it, a step is there twice, or a head
            or an alarm is of a step that `steps` does not have.
    """
    given = {"heads": heads, "steps": steps, "alarms": alarms}
    tables = Tables(**{name: _from_rows(name, rows) for name, rows in given.items()})
    if wrong := _wrong(tables):
        raise InvalidValueError(wrong, hint="Give each step one row in `steps`, and its heads and alarms with it.")
    return tables


def _from_rows(name: str, rows: Sequence[Row]) -> Table:
    known = {column.name for column in TABLES[name]}
    if unknown := {key for row in rows for key in row} - known:
        raise InvalidValueError(
            f"{name} have no column {', '.join(sorted(map(repr, unknown)))}",
            hint=f"The columns are {', '.join(sorted(known))}.",
        )
    for column in TABLES[name]:
        if not column.nullable and any(row.get(column.name) is None for row in rows):
            raise InvalidValueError(f"{name} lack {column.name!r} in a row", hint="Each row has it.")
    try:
        table = arrow().Table.from_pylist(list(rows), schema=schema(name))
    except (arrow().ArrowException, ValueError, TypeError, OverflowError) as error:
        raise InvalidValueError(
            f"a value does not fit its column of {name}: {short_text(error)}",
            hint="sqrtdk.monitor.columns lists the types.",
        ) from error
    for column in TABLES[name]:
        if column.type == "string" and _longest(table.column(column.name)) > MAX_TEXT:
            raise InvalidValueError(
                f"a text in {column.name!r} of {name} has more than {MAX_TEXT} bytes", hint="Cut it."
            )
    return table.take(np.argsort(_steps(table), kind="stable"))


def _steps(table: Table) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.asarray(table.column("step").to_numpy(), dtype=np.int64)


def _wrong(tables: Tables) -> str | None:
    """The rule that tables of a part break, if one."""
    steps = _steps(tables.steps)
    if steps.size and (steps[0] < 0 or (np.diff(steps) <= 0).any()):
        return "a step is below 0, or there twice"
    for name, table in (("heads", tables.heads), ("alarms", tables.alarms)):
        there = _steps(table)
        if (np.diff(there) < 0).any():
            return f"the {name} are not in order of step"
        if (other := np.setdiff1d(there, steps)).size:
            return f"the {name} have step {other[0]}, which `steps` does not have"
    return None


def joined(tables: Sequence[Tables]) -> Tables:
    """Tables one after the other, in the order given."""
    pa = arrow()

    def join(name: str) -> Table:
        some = [getattr(each, name) for each in tables]
        return pa.concat_tables([schema(name).empty_table(), *some]).combine_chunks()

    return Tables(**{name: join(name) for name in TABLES})


def encode(tables: Tables) -> Any:
    """A part: the bytes of one Parquet file, as an Arrow buffer.

    Raises:
        InvalidValueError: There are more rows than a part may have.
    """
    if len(tables) > MAX_ROWS:
        raise InvalidValueError(f"{len(tables)} rows; a part has at most {MAX_ROWS}", hint="Write fewer steps at once.")
    pa = arrow()
    size = sum(column.nbytes for name in TABLES for column in getattr(tables, name).columns)
    if size > MAX_BYTES:
        raise InvalidValueError(f"{size} bytes; a part has at most {MAX_BYTES}", hint="Write fewer at once.")
    some = [getattr(tables, name).append_column("table", [[name] * getattr(tables, name).num_rows]) for name in TABLES]
    whole = pa.concat_tables(some, promote_options="default").select(_file_schema().names).cast(_file_schema())
    sink = pa.BufferOutputStream()
    arrow("pyarrow.parquet").write_table(
        whole.combine_chunks(),
        sink,
        row_group_size=MAX_ROWS,
        compression=_CODEC,
        use_dictionary=list(_TEXTS),
        write_statistics=["step"],
        write_page_checksum=True,
    )
    return sink.getvalue()


def decode(content: bytes) -> Tables:
    """The tables of a part.

    Raises:
        RunFolderError: The bytes are no whole file, or not one of ours.
    """
    pa = arrow()
    try:
        file = arrow("pyarrow.parquet").ParquetFile(
            pa.BufferReader(content),
            page_checksum_verification=True,
            read_dictionary=list(_TEXTS),
            thrift_string_size_limit=2**20,
            thrift_container_size_limit=2**10,
        )
        _check_shape(file)
        whole = file.read(use_threads=False).combine_chunks()
        whole.validate(full=True)
    except (pa.ArrowException, OSError, ValueError, KeyError, MemoryError, RecursionError) as error:
        if isinstance(error, RunFolderError):
            raise
        raise RunFolderError(f"it is damaged: {kind_and_text(error)}") from error
    for name in _TEXTS:
        _check_texts(whole.column(name))
    whole = whole.cast(_file_schema())
    tables = Tables(**{name: _of(whole, name) for name in TABLES})
    if len(tables) != whole.num_rows:
        raise RunFolderError("it has rows of no table")
    if wrong := _wrong(tables):
        raise RunFolderError(wrong)
    return tables


def _check_shape(file: Any) -> None:
    """What the file says of itself before it is unpacked: its reader goes by the same figures."""
    about = file.metadata
    if not file.schema_arrow.equals(_file_schema("dictionary")):
        raise RunFolderError("it has other columns than this version writes")
    if about.num_row_groups != 1 or not 0 < about.num_rows <= MAX_ROWS:
        raise RunFolderError(f"it has {about.num_rows} rows in {about.num_row_groups} groups; at most {MAX_ROWS} in 1")
    group = about.row_group(0)
    if any(group.column(at).compression != _CODEC for at in range(group.num_columns)):
        raise RunFolderError(f"it is not packed with {_CODEC}")


def _check_texts(column: Any) -> None:
    """Texts are still kept once each: what they take when they are spelled out must be bounded first."""
    pc = arrow("pyarrow.compute")
    for chunk in column.chunks:
        if _longest(chunk.dictionary) > MAX_TEXT:
            raise RunFolderError(f"it has a text of more than {MAX_TEXT} bytes")
        lengths = pc.binary_length(chunk.dictionary)
        if (pc.sum(lengths.take(chunk.indices)).as_py() or 0) > MAX_BYTES:
            raise RunFolderError(f"it has more than {MAX_BYTES} bytes of text")


def _longest(texts: Any) -> int:
    """Bytes of the longest text of an Arrow array."""
    pc = arrow("pyarrow.compute")
    return int(pc.max(pc.binary_length(texts)).as_py() or 0)


def _of(whole: Table, name: str) -> Table:
    """The rows of one table, with its columns."""
    rows = whole.filter(arrow("pyarrow.compute").equal(whole.column("table"), name))
    some = rows.select([column.name for column in TABLES[name]])
    for column in TABLES[name]:
        if not column.nullable and some.column(column.name).null_count:
            raise RunFolderError(f"{name} lack {column.name!r} in a row")
    return some.cast(schema(name))

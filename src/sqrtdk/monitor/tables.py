"""The three tables of some steps, and the Parquet file that holds them together.

The file has the columns of all three tables, and the column `table`, which names the table of each row; the columns of
other tables are null in it. An untrusted file is held to the schema, to the codec of our writer (snappy, unlike others,
can't expand far beyond the size of the file) and to limits, before anything is built from it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sqrtdk import _extras
from sqrtdk.errors import InvalidValueError, RunFolderError, kind_and_text, short_text
from sqrtdk.messages import Message
from sqrtdk.monitor.columns import COLUMNS_BY_TABLE, LATER
from sqrtdk.monitor.footer import SNAPPY, codecs

Row = Mapping[str, object]
Table = Any  # a pyarrow.Table; pyarrow has no types
Rows = Sequence[Row] | Table
Numbers = np.ndarray[Any, Any]
MAX_PART_ROWS = 2**20  # of a part
MAX_CELL_CHARACTERS = 10_000  # bytes of one text
MAX_UNPACKED_PART_BYTES = 2**26  # of a part, unpacked
MAX_PART_FILE_BYTES = 2 * MAX_UNPACKED_PART_BYTES
PART_ROWS = 2**17  # of a part as written; a failed write is tried again one part at a time
PART_BYTES = 2**25
_CODEC = "SNAPPY"
_ALL = {column.name: column for columns in COLUMNS_BY_TABLE.values() for column in columns}
_STRING_COLUMNS = ("table", *(name for name, column in _ALL.items() if column.type == "string"))


def arrow(name: str = "pyarrow") -> Any:
    """Import pyarrow, or a part of it.

    Raises:
        MissingExtraError: It is not installed.

    Example:
        >>> arrow().__name__
        'pyarrow'
    """
    return _extras.load_extra(name, extra="watch")


@dataclass(frozen=True, slots=True)
class Tables:
    """Records of a run, as pyarrow tables; `len` is the number of rows of all tables.

    Each table is in the order of its steps.

    Attributes:
        heads: One row for each head of each sampled step, with the columns `HEAD_COLUMNS` of `sqrtdk.monitor.columns`.
        steps: One row for each step, with the columns `STEP_COLUMNS`.
        alarms: One row for each alarm, with the columns `ALARM_COLUMNS`.
    """

    heads: Table
    steps: Table
    alarms: Table

    def __len__(self) -> int:
        return sum(table.num_rows for table in (self.heads, self.steps, self.alarms))

    @property
    def nbytes(self) -> int:
        """Bytes of all columns in memory."""
        return sum(int(column.nbytes) for table in (self.heads, self.steps, self.alarms) for column in table.columns)

    @property
    def first_step(self) -> int:
        """Smallest step of a row, over all tables. At least one table must have a row."""
        return min(int(_steps(table)[0]) for table in (self.heads, self.steps, self.alarms) if table.num_rows)

    @property
    def last_step(self) -> int:
        """Largest step of a row, over all tables. At least one table must have a row."""
        return max(int(_steps(table)[-1]) for table in (self.heads, self.steps, self.alarms) if table.num_rows)

    def between(self, first: int, last: int | None) -> Tables:
        """Return the rows of some steps, as views of the tables.

        Args:
            first: First step.
            last: Last step, included; None for all steps from `first` on.
        """

        def rows(table: Table) -> Table:
            start, stop = np.searchsorted(_steps(table), [first, first if last is None else last + 1])
            return table.slice(start, (table.num_rows if last is None else max(start, stop)) - start)

        return Tables(rows(self.heads), rows(self.steps), rows(self.alarms))

    def pieces(self) -> Iterator[Tables]:
        """Split the rows into parts of a size to write, in order.

        A step larger than that becomes several pieces, and its row of `steps` is in the last of them. Until that row is
        written, the step is incomplete.
        """
        if len(self) < 2 or (len(self) <= PART_ROWS and self.nbytes <= PART_BYTES):
            yield self
            return
        first, last, half = self.first_step, self.last_step, len(self) // 2
        if first < last:
            of_rows = np.sort(np.concatenate([_steps(table) for table in (self.heads, self.steps, self.alarms)]))
            middle = max(first + 1, int(of_rows[half]))
            yield from self.between(first, middle - 1).pieces()
            yield from self.between(middle, last).pieces()
            return
        heads = min(half, self.heads.num_rows)
        alarms = half - heads
        yield from Tables(self.heads[:heads], self.steps[:0], self.alarms[:alarms]).pieces()
        yield from Tables(self.heads[heads:], self.steps, self.alarms[alarms:]).pieces()


@functools.cache
def schema(table: str) -> Any:
    """The Arrow schema of a table of `columns.COLUMNS_BY_TABLE`.

    Example:
        >>> schema("alarms").field("head").type, schema("alarms").field("name").nullable
        (DataType(int32), False)
    """
    fields = [arrow().field(column.name, _type(column.type), column.nullable) for column in COLUMNS_BY_TABLE[table]]
    return arrow().schema(fields)


def _type(name: str) -> Any:
    return arrow().type_for_alias(name)


@functools.cache
def _file_schema(texts: str = "string", lacks: int = 0) -> Any:
    """Return the schema of a file. Columns of other tables are null in a row, so all but `step` are nullable.

    Args:
        texts: "string", or "dictionary", as a file is read.
        lacks: how many of the last entries of `LATER` are missing, in the file of an older version.
    """
    pa = arrow()
    kinds = {"string": pa.string(), "dictionary": pa.dictionary(pa.int32(), pa.string())}
    fields = [pa.field("table", kinds[texts], nullable=False)]
    for name, column in _ALL.items():
        if any(name in some for some in LATER[len(LATER) - lacks :]):
            continue
        kind = kinds[texts] if column.type == "string" else _type(column.type)
        fields.append(pa.field(name, kind, nullable=name != "step"))
    return pa.schema(fields)


def tables_from_rows(heads: Rows, steps: Rows, alarms: Rows) -> Tables:
    """Make tables from rows; a pyarrow table with the right columns is used as it is.

    Args:
        heads: one row per head of a call at a sampled step; a nullable column may be left out.
        steps: one row per step, in any order, each step once.
        alarms: one row per alarm.

    Raises:
        InvalidValueError: A column is unknown or missing, a value does not fit it, a step appears twice, or the step of
            a head or an alarm is not in `steps`. If `steps` is empty, all rows must be of one step.
    """
    every = {"heads": heads, "steps": steps, "alarms": alarms}
    made = {name: _from_rows(name, rows) if isinstance(rows, Sequence) else rows for name, rows in every.items()}
    for name, table in made.items():
        for column in COLUMNS_BY_TABLE[name]:
            if not column.nullable and table.column(column.name).null_count:
                raise InvalidValueError(f"{name} lack {column.name!r} in a row", hint="Each row has it.")
    tables = Tables(**made)
    if wrong := _wrong(tables):
        raise InvalidValueError(wrong, hint="Give each step one row in `steps`, and its heads and alarms with it.")
    return tables


def from_columns(name: str, columns: Mapping[str, Sequence[object] | Numbers]) -> Table:
    """Make a table from columns; NaN and missing columns become null.

    Args:
        name: of the table.
        columns: by name, all of one length, in order of step; "step" is required.

    Example:
        >>> from_columns("steps", {"step": [1, 2], "loss": np.array([0.5, np.nan])})["loss"].to_pylist()
        [0.5, None]
    """
    pa = arrow()
    count = len(columns["step"])
    arrays = [
        pa.array(columns[field.name], field.type, from_pandas=True)
        if field.name in columns
        else pa.nulls(count, field.type)
        for field in schema(name)
    ]
    return pa.Table.from_arrays(arrays, schema=schema(name))


def stacked(name: str, tables: Sequence[Table]) -> Table:
    """Return one table with the rows of all, in their order.

    Args:
        name: Name of the table, "heads", "steps" or "alarms"; without `tables`, the result is empty with its columns.
        tables: pyarrow tables with the columns of that name.
    """
    return arrow().concat_tables([schema(name).empty_table(), *tables]).combine_chunks()


def _from_rows(name: str, rows: Sequence[Row]) -> Table:
    """Return rows as a pyarrow table of a name, ordered by step.

    Raises:
        InvalidValueError: A column is unknown or missing, or a value does not fit its type.
    """
    known = {column.name for column in COLUMNS_BY_TABLE[name]}
    if unknown := {key for row in rows for key in row} - known:
        raise InvalidValueError(
            f"{name} have no column {', '.join(sorted(map(repr, unknown)))}",
            hint=f"The columns are {', '.join(sorted(known))}.",
        )
    for column in COLUMNS_BY_TABLE[name]:
        if not column.nullable and any(row.get(column.name) is None for row in rows):
            raise InvalidValueError(f"{name} lack {column.name!r} in a row", hint="Each row has it.")
    try:
        table = arrow().Table.from_pylist(list(rows), schema=schema(name))
    except (arrow().ArrowException, ValueError, TypeError, OverflowError) as error:
        raise InvalidValueError(
            f"a value does not fit its column of {name}: {short_text(error)}",
            hint="sqrtdk.monitor.columns lists the types.",
        ) from error
    for column in COLUMNS_BY_TABLE[name]:
        if column.type == "string" and _longest(table.column(column.name)) > MAX_CELL_CHARACTERS:
            raise InvalidValueError(
                f"a text in {column.name!r} of {name} has more than {MAX_CELL_CHARACTERS} bytes", hint="Cut it."
            )
    return table.take(np.argsort(_steps(table), kind="stable"))


def _steps(table: Table) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.asarray(table.column("step").to_numpy(), dtype=np.int64)


def _wrong(tables: Tables) -> str | None:
    """Return the rule that the tables of a part break; None if they break none."""
    steps = _steps(tables.steps)
    if steps.size and (steps[0] < 0 or (np.diff(steps) <= 0).any()):
        return Message("alarms.part.step_twice")
    for name, table in (("heads", tables.heads), ("alarms", tables.alarms)):
        there = _steps(table)
        if (np.diff(there) < 0).any():
            return Message("alarms.part.out_of_order", table=name)
        more = not steps.size and len(tables) and 0 <= tables.first_step == tables.last_step
        if not more and (other := np.setdiff1d(there, steps)).size:
            return Message("alarms.part.foreign_step", table=name, step=int(other[0]))
    return None


def concatenate(tables: Sequence[Tables]) -> Tables:
    """Return one set of tables with the rows of all, in their order."""
    return Tables(**{name: stacked(name, [getattr(each, name) for each in tables]) for name in COLUMNS_BY_TABLE})


def encode_part(tables: Tables) -> Any:
    """Return the tables as the bytes of one Parquet file, in an Arrow buffer.

    Raises:
        InvalidValueError: There are more rows than a part may have.
    """
    if len(tables) > MAX_PART_ROWS:
        raise InvalidValueError(
            f"{len(tables)} rows; a part has at most {MAX_PART_ROWS}", hint="Write fewer steps at once."
        )
    pa = arrow()
    if (size := tables.nbytes) > MAX_UNPACKED_PART_BYTES:
        raise InvalidValueError(
            f"{size} bytes; a part has at most {MAX_UNPACKED_PART_BYTES}", hint="Write fewer at once."
        )
    some = [
        getattr(tables, name).append_column("table", [[name] * getattr(tables, name).num_rows])
        for name in COLUMNS_BY_TABLE
    ]
    whole = pa.concat_tables(some, promote_options="default").select(_file_schema().names).cast(_file_schema())
    sink = pa.BufferOutputStream()
    arrow("pyarrow.parquet").write_table(
        whole.combine_chunks(),
        sink,
        row_group_size=MAX_PART_ROWS,
        compression=_CODEC,
        use_dictionary=list(_STRING_COLUMNS),
        write_statistics=["step"],
        write_page_checksum=True,
    )
    return sink.getvalue()


def decode_part(content: bytes) -> Tables:
    """Return the tables of a part from its bytes.

    Raises:
        RunFolderError: The bytes are not a complete Parquet file, or not one that sqrtdk wrote.
    """
    pa = arrow()
    if other_codecs := sorted(set(codecs(content)) - {SNAPPY}):
        raise RunFolderError(Message("alarms.part.codec", codec=_CODEC, other=other_codecs[0]))
    try:
        there = set(_opened(content).metadata.schema.names)  # an older version wrote fewer columns
        file = _opened(content, [name for name in _STRING_COLUMNS if name in there])
        _check_shape(file)
        whole = file.read(use_threads=False).combine_chunks()
        whole.validate(full=True)
        for name in _STRING_COLUMNS:
            if name in whole.column_names:
                _check_texts(whole.column(name))
        for name in set(_file_schema().names) - set(whole.column_names):  # `_check_shape` lets no other one be missing
            whole = whole.append_column(name, pa.nulls(whole.num_rows, _file_schema().field(name).type))
        whole = whole.select(_file_schema().names).cast(_file_schema())
        tables = Tables(**{name: _of(whole, name) for name in COLUMNS_BY_TABLE})
        if len(tables) != whole.num_rows:
            raise RunFolderError(Message("alarms.part.no_table"))
        wrong = _wrong(tables)
    except RunFolderError:
        raise
    # pyarrow meets unexpected bytes with errors of many kinds: ArrowException, KeyError, ...
    except Exception as error:
        raise RunFolderError(Message("alarms.part.damaged", error=kind_and_text(error))) from error
    if wrong:
        raise RunFolderError(wrong)
    return tables


def _opened(content: bytes, dictionaries: Sequence[str] = ()) -> Any:
    """Return the Parquet file of these bytes, of which only the footer is read; named columns come as dictionaries."""
    return arrow("pyarrow.parquet").ParquetFile(
        arrow().BufferReader(content),
        page_checksum_verification=True,
        read_dictionary=list(dictionaries),
        thrift_string_size_limit=2**20,
        thrift_container_size_limit=2**10,
    )


def _check_shape(file: Any) -> None:
    """Check the file's own figures before it is unpacked, as pyarrow allocates by them."""
    about = file.metadata
    if not any(file.schema_arrow.equals(_file_schema("dictionary", lacks)) for lacks in range(len(LATER) + 1)):
        raise RunFolderError(Message("alarms.part.other_columns"))
    if about.num_row_groups != 1 or not 0 < about.num_rows <= MAX_PART_ROWS:
        counts = {"rows": about.num_rows, "groups": about.num_row_groups, "most": MAX_PART_ROWS}
        raise RunFolderError(Message("alarms.part.row_groups", **counts))


def _check_texts(column: Any) -> None:
    """Bound the size of the spelled-out texts first: in the file, each distinct text is stored only once."""
    pc = arrow("pyarrow.compute")
    for chunk in column.chunks:
        if _longest(chunk.dictionary) > MAX_CELL_CHARACTERS:
            raise RunFolderError(Message("alarms.part.long_text", most=MAX_CELL_CHARACTERS))
        lengths = pc.binary_length(chunk.dictionary)
        if (pc.sum(lengths.take(chunk.indices)).as_py() or 0) > MAX_UNPACKED_PART_BYTES:
            raise RunFolderError(Message("alarms.part.much_text", most=MAX_UNPACKED_PART_BYTES))


def _longest(texts: Any) -> int:
    """Return the size in bytes of the longest text of an Arrow array."""
    pc = arrow("pyarrow.compute")
    return int(pc.max(pc.binary_length(texts)).as_py() or 0)


def _of(whole: Table, name: str) -> Table:
    """Return the rows of one table, with its columns."""
    rows = whole.filter(arrow("pyarrow.compute").equal(whole.column("table"), name))
    some = rows.select([column.name for column in COLUMNS_BY_TABLE[name]])
    for column in COLUMNS_BY_TABLE[name]:
        if not column.nullable and some.column(column.name).null_count:
            raise RunFolderError(Message("alarms.part.lacks_column", table=name, column=repr(column.name)))
    return some.cast(schema(name))

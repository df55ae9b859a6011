"""The attentions of a run over its samples: values by statistic, step and head, read from the rows of the records.

The records are untrusted: heads and sites are counted from the rows, and no array is sized by a number in the file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sqrtdk._sites import site_name
from sqrtdk.monitor.reading import Run
from sqrtdk.report.watch.statistics import STATISTIC_BY_COLUMN, Array, badness

_LEFT_OUT = ("blind_rows", "nan_rows", "inf_rows")  # columns that count rows which no statistic includes


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """One attention over all samples that contain it.

    Attributes:
        site: module path.
        index: index of the call at the site.
        heads: numbers of the heads.
        steps: (n,) int64, ascending.
        values: column of `STATISTIC_BY_COLUMN` -> (n, H) float64; NaN is "not measured".
        left_out: column -> number of rows that no statistic includes, such as "nan_rows".
    """

    site: str
    index: int
    heads: tuple[int, ...]
    steps: Array
    values: Mapping[str, Array]
    left_out: Mapping[str, int]

    @property
    def label(self) -> str:
        """The site, followed by the index unless it is the first call.

        Example:
            >>> Site("h.0", 1, (0,), np.array([1]), {}, {}).label, Site("", 0, (0,), np.array([1]), {}, {}).label
            ('h.0 #1', '(root)')
        """
        return site_name(self.site, self.index)

    def worst(self, column: str) -> tuple[Array, Array]:
        """Return the value of the worst head in each sample, and which head it is.

        Returns:
            Values, (samples,), NaN where no head has one; and indices into `heads`, (samples,).
        """
        values = self.values[column]
        at = badness(values, column).argmax(1)
        return values[np.arange(len(values)), at], at

    def median(self, column: str) -> Array:
        """Return the median over heads in each sample, (samples,).

        Heads without a value don't count; the median is NaN if no head has one.
        """
        values = self.values[column]
        medians, some = np.full(len(values), math.nan), ~np.isnan(values).all(1)
        with np.errstate(invalid="ignore"):  # the median of plus and minus infinity is NaN
            medians[some] = np.nanmedian(values[some], axis=1)
        return medians


def sites_of(run: Run) -> Iterator[Site]:
    """Yield the attentions of a run, in the order of their first row in the records."""
    table = run.heads
    if not table.num_rows:
        return
    names = table["site"].combine_chunks().dictionary_encode()
    # group the rows by (site, index)
    keys = np.stack([names.indices.to_numpy(zero_copy_only=False), column_numbers(table, "index")], 1)
    places, first, of = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    steps, heads = column_numbers(table, "step"), column_numbers(table, "head")
    columns = {name: column_numbers(table, name) for name in STATISTIC_BY_COLUMN}
    # one sort instead of a mask for each site: a long run has millions of rows
    order = np.argsort(of.reshape(-1), kind="stable")
    groups = np.split(order, np.cumsum(np.bincount(of.reshape(-1)))[:-1])
    for place in np.argsort(first, kind="stable"):  # sites in the order of their first row
        rows = groups[place]
        own_steps, at_step = np.unique(steps[rows], return_inverse=True)
        own_heads, at_head = np.unique(heads[rows], return_inverse=True)
        values = {}
        for name, column in columns.items():
            # a head that has no row at a step stays NaN, "not measured"
            values[name] = np.full((len(own_steps), len(own_heads)), math.nan)
            values[name][at_step, at_head] = column[rows]
        left_out = {
            name: int(column_numbers(table, name)[rows].sum()) for name in ("blind_rows", "nan_rows", "inf_rows")
        }
        number, index = places[place].tolist()
        yield Site(names.dictionary[number].as_py(), index, tuple(own_heads.tolist()), own_steps, values, left_out)


def column_numbers(table: Any, column: str) -> Array:
    """Return a numeric column of a pyarrow table as a NumPy array, by the name of the column."""
    numbers: Array = table[column].to_numpy()
    return numbers

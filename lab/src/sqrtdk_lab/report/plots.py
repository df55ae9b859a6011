"""Draws the plots of a record with matplotlib: as SVG for the page, as SVG and PNG files.

Equal plots give equal bytes: settings and the salt of ids are fixed, and no date is written. Text becomes outlines, so
that a reader without the font sees the same picture.
"""

from __future__ import annotations

import io
import re
from pathlib import Path

from sqrtdk.errors import InvalidValueError
from sqrtdk.extending import load_extra, write_bytes
from sqrtdk.messages import Message
from sqrtdk_lab.figures import Plot
from sqrtdk_lab.record import Record
from sqrtdk_lab.report.axes import INK, LINE, PAPER, SIZE_INCHES, SOFT, draw

PNG_DPI = 160

_MATPLOTLIB_SETTINGS = {
    "svg.fonttype": "path",  # text as outlines
    "svg.hashsalt": "sqrtdk",  # the same ids in every run
    "font.size": 10.5,
    "text.color": INK,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "axes.formatter.useoffset": False,  # full tick labels instead of "+1e3" above the axis
    "axes.formatter.limits": (-4, 5),
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.which": "major",
    "grid.color": LINE,
    "grid.linewidth": 0.8,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "legend.handlelength": 1.8,
    "legend.columnspacing": 1.4,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "figure.facecolor": PAPER,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.h_pad": 0.06,
    "figure.constrained_layout.w_pad": 0.06,
}


def write_plots(record: Record, folder: Path, keep: bool = False) -> list[Path]:
    """Write each plot of a record as `<id>-<name>.svg` and `.png`, each whole or not at all.

    Args:
        record: the record of a claim.
        folder: an existing directory.
        keep: whether to leave existing files as they are instead of replacing them.

    Returns:
        The paths of all files, written or kept.

    Raises:
        InvalidValueError: the record's id and a plot's name don't make a safe file name.
        MissingExtraError: matplotlib is not installed.
        OutputError: a file can't be written.

    Example:
        >>> from sqrtdk_lab.claims.var_linear import CLAIM
        >>> from sqrtdk_lab.runner import run_claim
        >>> folder = getfixture("tmp_path")
        >>> [path.name for path in write_plots(run_claim(CLAIM, quick=True), folder)]
        ['var-linear-variance.svg', 'var-linear-variance.png']
    """
    paths: list[Path] = []
    for plot in record.plots:
        svg, png = files = plot_files(record, plot, folder)
        paths += files
        if keep and all(path.exists() for path in files):
            continue
        write_bytes(svg, to_svg(plot).encode(), force=True)
        write_bytes(png, to_png(plot), force=True)
    return paths


def plot_files(record: Record, plot: Plot, folder: Path) -> tuple[Path, Path]:
    """Return the SVG and the PNG file of a plot in a directory.

    Raises:
        InvalidValueError: the record's id and the plot's name don't make a safe file name.
    """
    stem = f"{record.id}-{plot.name}"
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", stem):
        raise InvalidValueError(
            Message("errors.output.plot_name", stem=repr(stem)),
            hint=Message("errors.hint.run_claim"),
        )
    return folder / f"{stem}.svg", folder / f"{stem}.png"


def to_svg(plot: Plot) -> str:
    """Draw a plot as a complete SVG document.

    Args:
        plot: a plot of a record.

    Raises:
        MissingExtraError: matplotlib is not installed.

    Example:
        >>> from sqrtdk_lab.figures import curve_series
        >>> from sqrtdk.messages import Text
        >>> theory = curve_series("theory", [1, 2], [1, 4])
        >>> square = Plot("square", Text("A square.", "平方。"), "$x$", "$x^2$", (theory,))
        >>> "</svg>" in to_svg(square), to_svg(square) == to_svg(square)
        (True, True)
    """
    return _drawn(plot, "svg").decode()


def to_png(plot: Plot) -> bytes:
    """Draw a plot as a PNG image, 1024 pixels wide.

    Args:
        plot: a plot of a record.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    return _drawn(plot, "png")


def _drawn(plot: Plot, kind: str) -> bytes:
    """Draw and save a plot, unaffected by the user's matplotlibrc.

    Each kind draws a new figure, because matplotlib lays out a figure at its first saving only.
    """
    figures, style = load_extra("matplotlib.figure"), load_extra("matplotlib.style")
    agg = load_extra("matplotlib.backends.backend_agg")
    buffer = io.BytesIO()
    # no date and no version of matplotlib, so that equal plots give equal files
    metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
    with style.context(["default", _MATPLOTLIB_SETTINGS]):  # "default" resets what a matplotlibrc sets
        figure = figures.Figure(figsize=SIZE_INCHES)
        agg.FigureCanvasAgg(figure)
        draw(figure, plot)
        figure.savefig(buffer, format=kind, dpi=PNG_DPI if kind == "png" else "figure", metadata=metadata)
    return buffer.getvalue()

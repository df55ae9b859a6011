import dataclasses
import itertools
import math
import re
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lab_tests.report.sample_lab import STYLES, plot, records, series
from sqrtdk.errors import InvalidValueError, MissingExtraError, OutputError
from sqrtdk_lab.figures import HeatMap, Series, Style, curve_series
from sqrtdk_lab.report.axes import SERIES_COLOURS, SIZE_INCHES, draw, matplotlib_label
from sqrtdk_lab.report.plots import to_png, to_svg, write_plots

# Machado, Oliveira and Fernandes (2009), severity 1: protanopia, deuteranopia, tritanopia
SIGHTS = np.array(
    [
        np.eye(3),
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
    ]
)


def _texts(svg: str) -> list[str]:
    """What is written: matplotlib notes each text beside its outlines."""
    return [text.strip() for text in re.findall(r"<!--(.*?)-->", svg, flags=re.DOTALL)]


@pytest.mark.parametrize("style", STYLES)
def test_every_style_is_drawn_in_its_colour(style: Style) -> None:
    svg = to_svg(plot(series("line"), series(style, "other", 1.5)))
    other = "stroke-dasharray: [^;]*; stroke-dashoffset: 0; stroke: #566072" if style == "dashed" else SERIES_COLOURS[1]
    assert svg.count(SERIES_COLOURS[0]) > 1
    assert re.search(other, svg)
    assert not re.search(other, to_svg(plot(series("line"))))
    assert {"measured", "other", "$d_k$", "size of it"} <= set(_texts(svg))


def test_dashed_series_without_labels_go_with_the_first_lines() -> None:
    every = [
        series(style, "", 1.0 + i) for i, style in enumerate(("line", "line", "curve", "points", "dashed", "dashed"))
    ]
    drawn = re.findall(r"stroke-dasharray: [^;]*; stroke-dashoffset: 0; stroke: (#\w{6})", to_svg(plot(*every)))
    assert drawn == [SERIES_COLOURS[0], SERIES_COLOURS[1]]


def test_dashed_series_have_the_colour_of_what_they_stand_next_to() -> None:
    def colours(*labels: str) -> list[str]:
        """Of the dashed ones, which start with '-'."""
        every = [
            series("dashed" if text[0] == "-" else "line", text.lstrip("-"), 1.0 + i) for i, text in enumerate(labels)
        ]
        drawn = re.findall(r"stroke-dasharray: [^;]*; stroke-dashoffset: 0; stroke: (#\w{6})", to_svg(plot(*every)))
        return drawn[: len(drawn) // 2]  # the others are in the legend

    assert colours("scaled", "unscaled", "-theory, unscaled", "-theory, scaled") == [
        SERIES_COLOURS[1],
        SERIES_COLOURS[0],
    ]
    assert colours("-none, 10%", "none, 50%", "-none, 90%", "sqrt, 50%", "-sqrt, 90%") == [
        SERIES_COLOURS[0],
        SERIES_COLOURS[0],
        SERIES_COLOURS[1],
    ]
    assert colours("a", "b", "-x", "-y") == [SERIES_COLOURS[0], SERIES_COLOURS[1]]
    assert colours("measured", "-x", "-y") == [SERIES_COLOURS[1], SERIES_COLOURS[2]]
    assert colours("measured", "b", "-theory") == ["#566072"]


@pytest.mark.parametrize(
    ("style", "points", "kind"),
    [
        ("line", 5, "LineCollection"),
        ("line", 40, "FillBetween"),
        ("points", 40, "LineCollection"),
        ("curve", 5, "FillBetween"),
        ("bars", 5, "LineCollection"),
    ],
)
def test_intervals_are_whiskers_or_a_band(style: Style, points: int, kind: str) -> None:
    x = series(style).x if style == "bars" else tuple(map(float, range(points)))
    full = Series("measured", x, (2.0,) * points, (1.0,) * points, (4.0,) * points, style)
    bare = dataclasses.replace(full, low=(), high=())
    drawn = {kind for kind in ("LineCollection", "FillBetween") if kind in to_svg(plot(full))}
    assert drawn == {kind}
    assert kind not in to_svg(plot(bare))


def test_bars_of_one_name_stand_side_by_side() -> None:
    other = Series("other", ("cosine", "new"), (3.0, 5.0), style="bars")
    svg = to_svg(plot(series("bars"), other))
    assert {"dot", "cosine", "additive", "bilinear", "general", "new"} <= set(_texts(svg))
    bars = {colour: re.findall(rf'd="M ([\d.]+) [^"]*" [^>]*fill: {colour}', svg) for colour in SERIES_COLOURS[:2]}
    assert [len(places) for places in bars.values()] == [5 + 1, 2 + 1]  # and one each in the legend
    left, right = (sorted(map(float, places))[1:] for places in bars.values())
    assert left[1] < right[0] < left[2]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("style", ["line", "curve", "dashed", "points"])
@pytest.mark.parametrize("axis", ["x_axis", "y_axis"])
def test_what_a_log_axis_cannot_show_is_left_out(style: Style, axis: str) -> None:
    good = series(style)
    bad = (0.0, -1.0, math.nan, math.inf, -math.inf)
    x = (*good.x, *(bad if axis == "x_axis" else [32.0] * 5))
    y = (*good.y, *(bad if axis == "y_axis" else [1.0] * 5))
    both = dataclasses.replace(good, x=x, y=y, low=(*good.low, *y[5:]), high=(*good.high, *y[5:]))
    assert to_svg(plot(both, **{axis: "log"})) == to_svg(plot(good, **{axis: "log"}))


@pytest.mark.parametrize("axis", ["linear", "log"])
def test_what_is_too_far_off_is_left_out(axis: str) -> None:
    good = series("line")
    far = (1e308, -1e308, 2e100, -2e100, math.inf)
    more = dataclasses.replace(
        good,
        x=(*good.x, *far, *[32.0] * 5),
        y=(*good.y, *[1.0] * 5, *far),
        low=(*good.low, *[1.0] * 5, *far),
        high=(*good.high, *[1.0] * 5, *far),
    )
    axes = {"x_axis": axis, "y_axis": axis}
    assert to_svg(plot(more, **axes)) == to_svg(plot(good, **axes))


def test_zero_bars_and_ends_of_intervals_on_a_log_axis() -> None:
    good = series("bars")
    with_zero = dataclasses.replace(good, y=(0.0, *good.y[1:]), low=(0.0, 0.0, math.nan, *good.low[3:]))
    svg = to_svg(plot(with_zero, y_axis="log"))
    assert len(re.findall(f"fill: {SERIES_COLOURS[0]}", svg)) == 4
    assert "nan" not in svg.lower()
    assert "inf" not in svg.lower()


def test_nothing_to_show_says_so() -> None:
    empty = Series("measured", (0.0, math.nan), (1.0, 2.0))
    assert "no value that can be shown" in _texts(to_svg(plot(empty, x_axis="log")))
    assert "no value that can be shown" not in _texts(to_svg(plot(series("line"), x_axis="log")))


def test_the_rounding_of_a_constant_is_not_drawn() -> None:
    """The logarithm of 256 in float32 and in float64: a level line, whose axis has numbers of a few digits."""
    lines = tuple(
        Series("", (1.0, 2.0), (value, value), style="line") for value in (5.545177459716797, 5.545177444479562)
    )
    ticks = [text for text in _texts(to_svg(plot(*lines))) if re.fullmatch(r"\d+\.\d+", text)]
    assert ticks
    assert all(len(text) <= 4 for text in ticks)


def test_powers_of_two_are_ticks_as_numbers() -> None:
    assert {"16", "32", "64", "128", "256"} <= set(_texts(to_svg(plot(series("line"), x_axis="log"))))


def test_reference_lines_have_labels() -> None:
    lines = (("uniform", 2.0), ("one-hot", 2.1), ("below the axis", -1.0), ("nowhere", math.nan))
    texts = _texts(to_svg(plot(series("line"), y_axis="log", lines=lines)))
    assert {"uniform", "one-hot"} <= set(texts)
    assert not {"below the axis", "nowhere"} & set(texts)
    assert "below the axis" in _texts(to_svg(plot(series("line"), lines=lines)))


def test_equal_plots_give_equal_bytes() -> None:
    one = plot(series("line"), series("dashed", "theory"), lines=(("limit", 3.0),))
    again = plot(series("line"), series("dashed", "theory"), lines=(("limit", 3.0),))
    svg, png = to_svg(one), to_png(one)
    with matplotlib.rc_context({"font.size": 30, "svg.fonttype": "none", "axes.labelpad": 30}):
        assert to_svg(again) == svg
        assert to_png(again) == png
    assert matplotlib.rcParams["svg.hashsalt"] is None
    assert "date" not in svg.lower()


def test_svg_needs_no_font() -> None:
    svg = to_svg(plot(series("line")))
    assert "<text" not in svg
    assert "font-family" not in svg


WIDE = {
    "reference lines": lambda: plot(
        series("line"), y_axis="log", lines=(("a rather long name of a line", 3.0), ("another", 3.1))
    ),
    "eight series": lambda: plot(*(series("curve", f"series {i} of the scale 1/sqrt", i + 1.0) for i in range(8))),
    "bars": lambda: plot(Series("a", tuple(f"a long name of bar {i}" for i in range(7)), (1.0,) * 7, style="bars")),
    "labels": lambda: dataclasses.replace(
        plot(series("line")), x_label="x " * 90, y_label="the y axis has a label of many words " * 3
    ),
    "names": lambda: plot(
        Series("a" * 150, ("n" * 90, "m"), (1.0, 2.0), style="bars"), series("line", "b" * 90), lines=(("c" * 90, 1.0),)
    ),
}


@pytest.mark.parametrize("name", WIDE)
def test_nothing_is_cut_off(name: str) -> None:
    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    draw(figure, WIDE[name]())
    figure.draw_without_rendering()
    box = figure.get_tightbbox()
    width, height = figure.get_size_inches()
    assert min(box.x0, box.y0) > -0.02
    assert box.x1 < width + 0.02
    assert box.y1 < height + 0.02
    assert figure.axes[0].get_position().width > 0.5
    assert figure.axes[0].get_position().height > 0.35


@pytest.mark.parametrize(
    "names",
    [
        ("none", "DeBERTa", "DeBERTa, fresh", "Shaw", "RoPE", "T5", "ALiBi"),
        (
            "Xavier uniform",
            "Xavier normal",
            "orthogonal",
            "LeCun normal",
            "Xavier, one head",
            "Kaiming normal",
            "N(0, 1)",
        ),
        tuple(f"case number {index}" for index in range(16)),
        ("dot", "cosine"),
    ],
)
def test_the_names_of_bars_never_touch(names: tuple[str, ...]) -> None:
    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    draw(figure, plot(Series("", names, (1.0,) * len(names), style="bars"), lines=(("product alone", 1.0),)))
    canvas.draw()
    labels = figure.axes[0].get_xticklabels()
    (angle,) = {label.get_rotation() for label in labels}
    for label in labels:
        label.set_rotation(0)
    boxes = [label.get_window_extent() for label in labels]
    if angle:  # rotated, every name ends at its tick
        step = boxes[1].x1 - boxes[0].x1
        assert step * math.sin(math.radians(angle)) > max(box.height for box in boxes)
    else:
        assert all(left.x1 + 2 < right.x0 for left, right in itertools.pairwise(boxes))
    assert bool(angle) == (len(names) > 2)


def test_mathematics_that_cannot_be_parsed_is_drawn_as_it_stands() -> None:
    broken = dataclasses.replace(plot(series("line")), x_label=r"$\frac{$", y_label="a $ b")
    assert {r"$\frac{$", "a $ b"} <= set(_texts(to_svg(broken)))


@pytest.mark.parametrize("depth", [21, 30, 95])
def test_mathematics_that_is_nested_too_deeply_is_drawn_as_it_stands(depth: int) -> None:
    text = f"${'{' * depth}x{'}' * depth}$"
    assert matplotlib_label(text, 400) == text.replace(
        "$", r"\$"
    )  # whether the parser gets through depends on who calls
    to_svg(dataclasses.replace(plot(series("line")), x_label=text))


def test_a_glyph_that_the_font_lacks_is_a_warning() -> None:
    with pytest.warns(UserWarning, match="missing from font"):
        to_svg(dataclasses.replace(plot(series("line")), x_label="维度"))


def test_colours_differ_for_every_sight() -> None:
    page = Path(sys.modules["sqrtdk_lab.report"].__file__ or "").parent / "templates" / "lab.css"
    light, dark = (re.findall(r"--c\d: (#\w{6})", line) for line in page.read_text().splitlines() if "--c0" in line)
    assert tuple(light) == SERIES_COLOURS
    for colours in (light, dark):
        seen = _lab(colours)
        distance = min(np.linalg.norm(a - b, axis=-1).min() for a, b in itertools.combinations(seen, 2))
        assert distance > 15


def _lab(colours: list[str]) -> np.ndarray:
    """CIE L*a*b* of each colour for each sight."""
    rgb = np.array([[int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)] for colour in colours])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.einsum("sij,nj->nsi", SIGHTS, linear), 0, 1)
    xyz = seen @ np.array([[0.4124, 0.2126, 0.0193], [0.3576, 0.7152, 0.1192], [0.1805, 0.0722, 0.9505]])
    t = xyz / np.array([0.9505, 1, 1.089])
    f = np.where(t > 0.008856, np.cbrt(t), 7.787 * t + 16 / 116)
    return np.stack([116 * f[..., 1] - 16, 500 * (f[..., 0] - f[..., 1]), 200 * (f[..., 1] - f[..., 2])], -1)


def test_write_plots_names_whole_files(tmp_path: Path) -> None:
    record = records()[3]
    paths = write_plots(record, tmp_path)
    assert sorted(path.name for path in paths) == sorted(path.name for path in tmp_path.iterdir())
    assert [path.name for path in paths] == [
        f"minmax-by-dim-{p.name}.{kind}" for p in record.plots for kind in ("svg", "png")
    ]
    assert paths[0].read_text() == to_svg(record.plots[0])
    assert paths[1].read_bytes() == to_png(record.plots[0])
    assert paths[1].read_bytes().startswith(b"\x89PNG")


def test_files_are_kept_or_replaced(tmp_path: Path) -> None:
    record = records()[0]
    (path, other) = write_plots(record, tmp_path)
    path.write_text("mine")
    write_plots(record, tmp_path, keep=True)
    assert path.read_text() == "mine"
    other.unlink()
    write_plots(record, tmp_path, keep=True)  # half of a pair is none
    assert path.read_text() != "mine"
    path.write_text("mine")
    write_plots(record, tmp_path)
    assert path.read_text() == to_svg(record.plots[0])


def test_a_record_without_plots_writes_none(tmp_path: Path) -> None:
    assert write_plots(records()[1], tmp_path) == []


@pytest.mark.parametrize("name", ["../outside", "a/b", "", ".hidden", "a b"])
def test_names_that_are_no_file_names_are_refused(tmp_path: Path, name: str) -> None:
    record = dataclasses.replace(records()[0], id=name)
    with pytest.raises(InvalidValueError, match="can't be called"):
        write_plots(record, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="no directory"):
        write_plots(records()[0], tmp_path / "absent")


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match="matplotlib") as caught:
        to_svg(plot(curve_series("a", [1], [1])))
    assert "pip install 'sqrtdk[lab]'" in caught.value.hint


def test_a_map_has_a_cell_for_each_number_and_an_empty_one_for_none() -> None:
    drawn = HeatMap("ratio", (1.0, 2.0), (1.0, 4.0), ((0.5, math.nan), (1.0, 2.0)), "log", 1.0)
    base = plot(series("line"))
    part, whole = (
        to_svg(dataclasses.replace(base, series=(), map=one))
        for one in (drawn, dataclasses.replace(drawn, values=((0.5, 4.0), (1.0, 2.0))))
    )
    assert {"0.5", "1", "2"} <= set(_texts(part))
    assert "4" in _texts(whole)
    assert "nan" not in _texts(part)
    assert "<image" not in whole  # the page takes no bitmap

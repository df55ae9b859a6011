"""Wrapping and tables: nothing is lost, nothing is too wide, and Chinese punctuation stays where it belongs."""

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.text import Text

from sqrtdk.report.console import TableColumn, console_text, paragraph, print_table, wrapped

CLOSING = "，。：；？！、）》」”…"
TEXT = st.text(st.sampled_from("ab1 -/.,;softmax缩放因子（）《》，。：；？！、\U0001f600"), max_size=60)


@settings(max_examples=50, deadline=None)
@given(TEXT, st.integers(4, 30))
def test_wrapping_loses_nothing_and_is_never_too_wide(text: str, width: int) -> None:
    lines = [line.plain for line in wrapped(Text(text), width)]
    assert all(cell_len(line) <= width for line in lines)
    assert "".join("".join(lines).split()) == "".join(text.split())


def test_closing_punctuation_never_begins_a_line() -> None:
    text = (
        "缩放因子太大（是应有值的 8 倍）：没有除以 sqrt(head_dim)，因此 softmax 饱和。请看：q、k、v！“是吗？”《论文》"
    )
    for width in range(12, 60):
        lines = [line.plain for line in wrapped(Text(text), width)]
        assert len(lines) > 1
        assert not [line for line in lines if line[0] in CLOSING], width
        assert not [line for line in lines if line[-1] in "（《“"], width


def test_wrapping_keeps_styles() -> None:
    text = Text.assemble(("red words here", "red"), " and plain ones")
    assert [[(span.start, span.end) for span in line.spans] for line in wrapped(text, 9)] == [
        [(0, 9)],
        [(0, 4)],
        [],
        [],
    ]


COLUMNS = (
    TableColumn("site"),
    TableColumn("count", right=True),
    TableColumn("名称", right=True),
    TableColumn("what it is", prose=True),
)
ROWS = [
    ("layers.0-31.attention", "12", "缩放因子", "a text that is rather long and wraps at some width or other"),
    ("short", "1,234,567", "熵", "短句，带标点。"),
]


def test_a_table_fits_and_keeps_its_words() -> None:
    words = {word for row in ROWS for cell in row for word in cell.split() if word.isascii()}
    for width in range(40, 121):
        text = console_text(lambda console: print_table(console, COLUMNS, ROWS, indent=2), width, False)
        assert max(map(cell_len, text.splitlines())) <= width
        assert words <= {word.strip(";") for word in text.split()}, width


def test_what_becomes_of_a_table_that_is_too_wide() -> None:
    def at(width: int) -> list[str]:
        return console_text(lambda console: print_table(console, COLUMNS[:3], [ROWS[0][:3]]), width, False).splitlines()

    assert at(45) == ["site                   count      名称", "layers.0-31.attention     12  缩放因子"]
    narrow = (TableColumn("site"), *(TableColumn(f"count {i}", right=True) for i in range(4)))
    row = ("layers.0-31.attention", "1", "2", "3", "4")
    drawn_at = [
        console_text(lambda console: print_table(console, narrow, [row]), width, False).splitlines()
        for width in (62, 44, 40)
    ]
    assert drawn_at[0][1] == "layers.0-31.attention        1        2        3        4"
    assert drawn_at[1] == [
        "  count 0  count 1  count 2  count 3",
        "layers.0-31.attention",
        "        1        2        3        4",
    ]
    wide = (TableColumn("site"), *(TableColumn(f"a long title {i}") for i in range(4)))
    text = console_text(lambda console: print_table(console, wide, [row]), 40, False)
    assert text.splitlines() == [
        "layers.0-31.attention",
        "  a long title 0 1; a long title 1 2;",
        "    a long title 2 3; a long title 3 4",
    ]


def test_a_paragraph_that_fits_takes_the_whole_width() -> None:
    text = "x" * 36 + " yz"
    assert console_text(lambda console: paragraph(console, f"{text} "), 40, False) == f"{text}\n"
    assert console_text(lambda console: paragraph(console, f"{text} 0"), 40, False) == f"{'x' * 36}\n  yz 0\n"


def test_a_table_that_is_broken_up_keeps_its_columns() -> None:
    columns = (TableColumn("site"), TableColumn("cause", prose=True), TableColumn("explained", right=True))
    rows = [("h.0." + "a" * 40, "one", "9%"), ("h.1." + "a" * 40, "a cause of so many words that it wraps", "100%")]
    text = console_text(lambda console: print_table(console, columns, rows), 48, False)
    assert {len(line) for line in text.split("\n") if line.endswith(("explained", "%"))} == {48}


def test_a_long_name_folds_and_its_row_stays_a_row() -> None:
    columns = (TableColumn("site", fold=True), TableColumn("newest", right=True))
    text = console_text(lambda console: print_table(console, columns, [("a" * 60, "9.5")]), 40, False)
    first, second, third = text.rstrip("\n").split("\n")
    assert first.split() == ["site", "newest"]
    assert second.split() == ["a" * 32, "9.5"]
    assert third == "a" * 28

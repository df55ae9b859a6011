"""The page of the architecture: its floors are those that import-linter holds, its files and tables are there."""

from __future__ import annotations

import re
import tomllib

from tests.docs.pages import DOCS, ROOT

PAGE = (DOCS / "en" / "architecture.md").read_text(encoding="utf-8")
SOURCE = ROOT / "src" / "sqrtdk"


def rows(title: str) -> list[list[str]]:
    """Cells of the table with this first title, its head left out."""
    table = PAGE.split(f"\n| {title} |")[1].split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]


def test_the_floors_are_those_of_the_contract() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contract = project["tool"]["importlinter"]["contracts"][0]["layers"]
    assert [re.findall(r"`(\w+)`", floor) for floor, _ in rows("floor")] == [layer.split(" | ") for layer in contract]


def test_each_file_and_table_is_where_the_page_says() -> None:
    places = rows("new thing")
    assert len(places) == 11
    for _, file, table in places:
        folder, name = re.findall(r"`((?:lab/)?src/[^`]+)`", file)[0].rsplit("/", 1)
        found = list((ROOT / folder).glob(name.replace("NAME", "*") or "*.py"))
        assert len(found) > (5 if "NAME" in name else 0), file
        name, path = re.findall(r"`([^`]+)`", table)
        assert re.search(
            rf"^{name}\b.* = ",
            (ROOT if path.startswith("lab/") else SOURCE).joinpath(path).read_text(encoding="utf-8"),
            re.MULTILINE,
        ), table


def test_every_kind_has_an_example() -> None:
    for thing, *_ in rows("new thing"):
        section = PAGE.split(f"\n## A new {thing.replace('of a watch', '').strip()}")[1].split("\n## ")[0]
        assert ">>>" in section, thing

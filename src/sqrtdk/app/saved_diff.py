"""A saved comparison: whether the sides are the same, what differs at each pair, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from sqrtdk.app import fields
from sqrtdk.app.catalogue import Words
from sqrtdk.app.pieces import Cell, command, headline, lead, left, recorded, shown, table
from sqrtdk.report.diff_causes import CAUSES
from sqrtdk.report.diff_words import STAGE_WORDS
from sqrtdk.report.figures import number, percent

_RESULTS = {True: ("same", "good"), False: ("different", "bad"), None: ("unjudged", "doubtful")}
_COLUMNS = ("site_a", "site_b", "stage", "causes", "explained", "residue", "allowed")


def diff_html(document: Mapping[str, Any], words: Words) -> Markup:
    """Draw the document of `sqrtdk diff --output`."""
    word, tone = _RESULTS[_same(document["same"])]
    sides = [fields.text(fields.mapping(document[side])["name"]) for side in ("a", "b")]
    pairs = [fields.mapping(one) for one in fields.listed(document["pairs"])]
    unpaired = [(side, fields.listed(document[f"unpaired_{side.lower()}"])) for side in ("A", "B")]
    open_ends = sum(len(entries) for _, entries in unpaired)
    if word == "same" and (open_ends or not pairs):
        word, tone = "unjudged", "doubtful"
    told = [recorded(fields.text(one), words) for one in fields.listed(document["paragraphs"])]
    rows = [_pair(one, words) for one in pairs[: fields.MOST_ROWS]]
    return Markup("").join(
        [
            headline(words(f"result.{word}"), tone, f"A {sides[0]} / B {sides[1]}"),
            *map(lead, told),
            command(document, words),
            table(words("diff.pairs"), [words(f"column.{name}") for name in _COLUMNS], rows),
            left(len(pairs), words),
            *(lead(words("diff.unpaired", side=side, count=len(entries))) for side, entries in unpaired if entries),
        ]
    )


def _same(value: Any) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise TypeError("same is true, false or null")
    return value


def _pair(pair: Mapping[str, Any], words: Words) -> tuple[Cell, ...]:
    stage = pair["first_stage"]
    names = [fields.text(fields.mapping(cause)["name"]) for cause in fields.listed(pair["causes"])]
    known = [
        Markup('<span title="{}">{}</span>').format(words.of(CAUSES[name]) if name in CAUSES else "", shown(name))
        for name in names
    ]
    stages = STAGE_WORDS.get(stage) if isinstance(stage, str) else None
    why = fields.maybe_text(pair["reason"])
    outcome = {True: "same", False: "different", None: "unjudged"}[_same(pair["same"])]
    shown_stage = fields.maybe_text(stage) if stages is None else words.of(stages)
    return (
        fields.maybe_text(pair["site_a"]),
        fields.maybe_text(pair["site_b"]),
        shown_stage if stage is not None else words(f"result.{outcome}"),
        Markup(", ").join(known) if known else why,
        percent(fields.maybe(pair["explained"])),
        number(fields.maybe(pair["residue"])),
        number(fields.maybe(pair["allowed"])),
    )

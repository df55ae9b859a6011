"""Figures of full runs of the lab: what the pages of claims and errata are judged by, and put into their words.

    sqrtdk lab run all --output FULL
    python benchmarks/lab_figures.py FULL --json benchmarks/results/lab-figures.json

A claim is taken from the first directory that has it. Exit code 1 where one has no sound and decided record of a full
run.
"""

from __future__ import annotations

import argparse
import json
import sys

from sqrtdk import _json
from sqrtdk_lab.record import Record
from sqrtdk_lab.register import CLAIMS
from sqrtdk_lab.runner import records


def row(record: Record) -> dict[str, object]:
    """A claim with its figures."""
    return {"id": record.id, "figures": record.outcome.figures}


def line(content: object) -> str:
    """As one line of JSON, without NaN."""
    return json.dumps(json.loads(_json.json_document(content)), separators=(",", ":"))


def answers(record: Record | None) -> bool:
    """Whether the record decides its claim: of a full run, with a sound control, and nothing undecided."""
    return record is not None and not record.quick and record.sound and record.decided


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", help="directories of `sqrtdk lab run`")
    parser.add_argument("--json", required=True)
    options = parser.parse_args()
    found = {record.id: record for folder in reversed(options.folders) for record in records(folder)}
    if unanswered := [claim for claim in CLAIMS if not answers(found.get(claim))]:
        sys.exit(f"no sound and decided record of a full run of {', '.join(unanswered)}")
    runs = [found[claim] for claim in CLAIMS]
    about = {"date": max(record.started for record in runs)[:10], "environment": runs[0].environment}
    rows = ",\n".join(line(row(record)) for record in runs)
    with open(options.json, "w", encoding="utf-8") as file:
        file.write(f'{line(about)[:-1]},"claims":[\n{rows}\n]}}\n')


if __name__ == "__main__":
    main()

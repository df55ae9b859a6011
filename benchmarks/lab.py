"""Verdicts and times of a quick and a full run of the lab, side by side.

    sqrtdk lab run all --quick --output QUICK && sqrtdk lab run all --output FULL
    python benchmarks/lab.py QUICK FULL --json benchmarks/results/lab.json

Exit code 1 where a verdict of the two differs, or one of them decides nothing. Times are those of the records: a run
that reused trainings of an interrupted one shows less than it took.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import date

from sqrtdk.lab.record import Record
from sqrtdk.lab.register import CLAIMS
from sqrtdk.lab.runner import records


def row(quick: Record, full: Record) -> dict[str, object]:
    """What both said of one claim."""
    found: dict[str, object] = {"id": quick.id}
    for name, record in (("quick", quick), ("full", full)):
        found[name] = {
            "verdict": record.outcome.verdict.answer,
            "control": record.control.verdict.answer,
            "decided": record.sound and record.decided,
            "seconds": record.duration_s,
        }
    found["same"] = quick.outcome.verdict.answer == full.outcome.verdict.answer
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("quick", help="directory of `sqrtdk lab run all --quick`")
    parser.add_argument("full", help="directory of `sqrtdk lab run all`")
    parser.add_argument("--json")
    options = parser.parse_args()
    runs = {name: {record.id: record for record in records(getattr(options, name))} for name in ("quick", "full")}
    missing = [f"{claim} ({name})" for name, found in runs.items() for claim in CLAIMS if claim not in found]
    if missing:
        sys.exit(f"no record of {', '.join(missing)}")
    rows = [row(runs["quick"][claim], runs["full"][claim]) for claim in CLAIMS]
    minutes = {name: sum(record.duration_s for record in found.values()) / 60 for name, found in runs.items()}
    for one in rows:
        texts = [f"{one[n]['verdict']:8s} {one[n]['seconds']:8.1f} s" for n in ("quick", "full")]
        print(f"{one['id']:20s} {texts[0]}   {texts[1]}")
    print(f"{len(rows)} claims: quick {minutes['quick']:.1f} min, full {minutes['full']:.1f} min")
    if options.json:
        environment = next(iter(runs["full"].values())).environment
        with open(options.json, "w", encoding="utf-8") as file:
            day = date.today().isoformat()
            json.dump({"date": day, "environment": environment, "minutes": minutes, "claims": rows}, file, indent=1)
    if not all(one["same"] and one["quick"]["decided"] and one["full"]["decided"] for one in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()

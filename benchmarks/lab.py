"""Verdicts and times of a quick and a full run of the lab, side by side, and the verdicts of other seeds.

    sqrtdk lab run all --quick --output QUICK && sqrtdk lab run all --output FULL
    for n in 1 2 3 4; do sqrtdk lab run all --quick --seed $n --output seeds/quick-$n; done
    for n in 1 2 3 4; do sqrtdk lab run CLAIM... --seed $n --output seeds/full-$n; done    # those that train nothing
    python benchmarks/lab.py QUICK FULL --seeds seeds/* --json benchmarks/results/lab.json

Exit code 1 where a verdict of a claim differs between two of its runs, or one of them decides nothing. A directory of
`--seeds` may hold any of the claims; a claim without a quick record of each of five seeds is an error. Times are those
of the records: a run that reused trainings of an interrupted one shows less than it took.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import date

from sqrtdk_lab.record import Record
from sqrtdk_lab.register import CLAIMS
from sqrtdk_lab.runner import records

SEEDS = range(5)
SIZES = {True: "quick", False: "full"}


def row(quick: Record, full: Record, seeds: Sequence[Record]) -> dict[str, object]:
    """What all runs said of one claim.

    Args:
        quick: its record of the quick run.
        full: its record of the full run.
        seeds: its records of further runs, which may be of other seeds.
    """
    found: dict[str, object] = {"id": quick.id}
    for name, record in (("quick", quick), ("full", full)):
        found[name] = {
            "verdict": record.outcome.verdict.answer,
            "control": record.control.verdict.answer,
            "decided": record.sound and record.decided,
            "seconds": record.duration_s,
        }
    every = sorted((quick, full, *seeds), key=lambda record: record.seed)
    if seeds:
        found["seeds"] = {
            size: {str(record.seed): record.outcome.verdict.answer for record in every if record.quick is is_quick}
            for is_quick, size in SIZES.items()
        }
    found["same"] = len({record.outcome.verdict.answer for record in every}) == 1
    found["answered"] = all(record.sound and record.decided for record in every)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("quick", help="directory of `sqrtdk lab run all --quick`")
    parser.add_argument("full", help="directory of `sqrtdk lab run all`")
    parser.add_argument("--seeds", nargs="+", default=[], metavar="DIR", help="directories of runs with other seeds")
    parser.add_argument("--json")
    options = parser.parse_args()
    runs = {name: {record.id: record for record in records(getattr(options, name))} for name in ("quick", "full")}
    missing = [f"{claim} ({name})" for name, found in runs.items() for claim in CLAIMS if claim not in found]
    wrong = [
        f"{one.id} in {name}" for name, found in runs.items() for one in found.values() if SIZES[one.quick] != name
    ]
    others: dict[str, list[Record]] = {claim: [] for claim in CLAIMS}
    for folder in options.seeds:
        for record in records(folder):
            others[record.id].append(record)
    if options.seeds:
        for claim in CLAIMS:
            there = {one.seed for one in (runs["quick"].get(claim), *others[claim]) if one is not None and one.quick}
            missing += [f"{claim} (quick, seed {seed})" for seed in SEEDS if seed not in there]
    if missing or wrong:
        sys.exit(f"no record of {', '.join(missing)}" if missing else f"of the other size: {', '.join(wrong)}")
    rows = [row(runs["quick"][claim], runs["full"][claim], others[claim]) for claim in CLAIMS]
    minutes = {name: sum(record.duration_s for record in found.values()) / 60 for name, found in runs.items()}
    for one in rows:
        texts = [f"{one[n]['verdict']:8s} {one[n]['seconds']:8.1f} s" for n in ("quick", "full")]
        marks = [mark for mark, fine in (("DIFFERS", one["same"]), ("UNDECIDED", one["answered"])) if not fine]
        print(f"{one['id']:20s} {texts[0]}   {texts[1]}   {' '.join(marks)}".rstrip())
    print(f"{len(rows)} claims: quick {minutes['quick']:.1f} min, full {minutes['full']:.1f} min")
    if options.json:
        environment = next(iter(runs["full"].values())).environment
        with open(options.json, "w", encoding="utf-8") as file:
            day = date.today().isoformat()
            json.dump({"date": day, "environment": environment, "minutes": minutes, "claims": rows}, file, indent=1)
    if not all(one["same"] and one["answered"] for one in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()

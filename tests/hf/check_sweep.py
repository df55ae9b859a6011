"""What `sqrtdk check` says of every model type of transformers: `python -m tests.hf.check_sweep OUT.jsonl [TYPE ...]`.

Each type is built small with random weights and checked in a process of its own, one after the other; of the laws only
`configured` and `parameters` are asked. A line of the record has the verdict of every call and every finding,
so that two records show what a change of the audit moved:
`python -m tests.hf.check_sweep --compare OLD.jsonl NEW.jsonl`. With `--laws all` the inputs are those that `check`
makes, and a line has every answer of the laws: an hour.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import sqrtdk
from tests.hf.small import NotBuiltError, build, inputs_of, small_config

TIMEOUT = 120


def checked(model_type: str, laws: str = "") -> dict[str, Any]:
    """The verdicts and the findings of one type, or why there are none."""
    try:
        model = build(small_config(model_type), "eager", torch.float32)
        inputs = inputs_of(model)
    except NotBuiltError as error:
        return {"state": "not built", "reason": str(error)}
    report = sqrtdk.check(model, laws=laws) if laws else sqrtdk.check(model, inputs, laws="configured,parameters")
    calls = [
        [f"{judged.call.site}#{judged.call.index}", judged.verdict, judged.mistake, str(judged.declared_by)]
        for judged in report.calls
    ]
    findings = [[found.severity, found.rule, found.site, str(found.message)] for found in report.findings]
    answers = [[answer.law, str(answer.about), answer.state, str(answer.reason)] for answer in report.laws]
    return {"state": "checked", "calls": calls, "findings": sorted(findings), "answers": answers if laws else []}


def _child(model_type: str, laws: str, end: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        record = checked(model_type, laws)
    except BaseException as error:
        record = {"state": "raised", "reason": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    end.send(record)
    end.close()


def apart(model_type: str, laws: str = "", seconds: float = TIMEOUT) -> dict[str, Any]:
    """`checked` in a process of its own, which may take some seconds and may die."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(False)
    process = context.Process(target=_child, args=(model_type, laws, there))
    begun = time.monotonic()
    process.start()
    there.close()
    try:
        record = here.recv() if here.poll(seconds) else {"state": "timed out"}
    except EOFError:
        record = {"state": "died"}
    process.kill()
    process.join()
    return {"type": model_type, "seconds": round(time.monotonic() - begun, 1), **record}


def differences(old: str, new: str) -> list[str]:
    """What two records say differently, a line each."""
    sides = [
        {record["type"]: record for record in map(json.loads, Path(name).read_text(encoding="utf-8").splitlines())}
        for name in (old, new)
    ]
    lines = []
    for model_type in sides[1]:
        before, after = (side.get(model_type, {"state": "no record"}) for side in sides)
        if before["state"] != after["state"]:
            lines.append(f"{model_type}: {before['state']} -> {after['state']} {after.get('reason', '')}")
        for part in ("calls", "findings", "answers"):
            was, now = ({json.dumps(entry) for entry in record.get(part, [])} for record in (before, after))
            lines += [f"{model_type}: - {entry}" for entry in sorted(was - now)]
            lines += [f"{model_type}: + {entry}" for entry in sorted(now - was)]
    return lines


def main() -> int:
    """Write a record, or print where two differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", action="store_true", help="compare two records")
    parser.add_argument("record", help="file to write, a line for each type; with --compare the older record")
    parser.add_argument("types", nargs="*", help="model types, all by default; with --compare the newer record")
    parser.add_argument("--laws", default="", help="laws to ask, on inputs that check makes")
    options = parser.parse_args()
    if options.compare:
        lines = differences(options.record, options.types[0])
        print("\n".join(lines))
        return int(bool(lines))
    torch.set_num_threads(1)
    checked("bert")  # the imports that all types need happen once, before the forks
    with open(options.record, "w", encoding="utf-8") as file:
        for model_type in options.types or list(CONFIG_MAPPING.keys()):
            record = apart(model_type, options.laws)
            worst = {found[0] for found in record.get("findings", [])}
            print(f"{model_type:32} {record['state']:10} {record['seconds']:6} {' '.join(sorted(worst))}", flush=True)
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            file.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())

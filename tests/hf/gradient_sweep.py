"""The law `gradient` over every model type of transformers: `python -m tests.hf.gradient_sweep OUT.jsonl [TYPE ...]`.

Each type is built small with random weights and asked in train mode, with its eager attention and through torch's
`scaled_dot_product_attention`, in a process of its own. A line of the record has the answers of one type with one of
them. The types come in an order that mixes the families, and those that the record already has are left out: a sweep
that was stopped goes on. The exit code is 1 if a law is broken, or a model died or ran out of time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import warnings
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from sqrtdk import laws
from sqrtdk.audit.records import BROKEN, KEPT
from tests.hf.small import NotBuiltError, build, inputs_of, small_config

TIMEOUT = 600  # seconds, of a machine that has more to do
IMPLEMENTATIONS = ("eager", "sdpa")
ASKED = "asked"
WRONG = ("timed out", "died")


def asked(model_type: str, implementation: str, dtype: str) -> dict[str, Any]:
    """The answers of one type, or why there are none."""
    try:
        model = build(small_config(model_type), implementation, getattr(torch, dtype))
        inputs = inputs_of(model)
    except NotBuiltError as error:
        return {"state": "not built", "reason": " ".join(str(error).split())[:200]}
    answers = laws.ask(model, inputs, "gradient").answers
    return {"state": ASKED, "answers": [[one.state, str(one.site), str(one.reason)] for one in answers]}


def _child(model_type: str, implementation: str, dtype: str, end: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        record = asked(model_type, implementation, dtype)
    except BaseException as error:
        record = {"state": "raised", "reason": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    end.send(record)
    end.close()


def apart(model_type: str, implementation: str, dtype: str) -> dict[str, Any]:
    """`asked` in a process of its own, which may take some minutes and may die."""
    here, there = multiprocessing.get_context("fork").Pipe(False)
    process = multiprocessing.get_context("fork").Process(
        target=_child, args=(model_type, implementation, dtype, there)
    )
    process.start()
    there.close()
    try:
        record = here.recv() if here.poll(TIMEOUT) else {"state": "timed out"}
    except EOFError:
        record = {"state": "died"}
    process.kill()
    process.join()
    return {"type": model_type, "attention": implementation, "dtype": dtype, **record}


def is_kept(record: dict[str, Any]) -> bool:
    """Whether the backward pass of a model was looked at, and no answer is a broken law."""
    states = {answer[0] for answer in record.get("answers", [])}
    return KEPT in states and BROKEN not in states


def is_broken(record: dict[str, Any]) -> bool:
    """Whether an answer is a broken law."""
    return any(answer[0] == BROKEN for answer in record.get("answers", []))


def tally(records: list[dict[str, Any]]) -> str:
    """How many types and models are in each state, and each broken law."""
    lines = [f"{len({one['type'] for one in records})} of {len(list(CONFIG_MAPPING.keys()))} model types"]
    for implementation in IMPLEMENTATIONS:
        mine = [one for one in records if one["attention"] == implementation]
        states = Counter(one["state"] for one in mine if one["state"] != ASKED)
        states |= Counter(
            "kept" if is_kept(one) else "broken" if is_broken(one) else "not asked"
            for one in mine
            if one["state"] == ASKED
        )
        lines.append(f"{implementation}: " + ", ".join(f"{count} {state}" for state, count in states.most_common()))
    for one in filter(is_broken, records):
        lines += [f"{one['type']}, {one['attention']}: {site}: {reason}" for state, site, reason in one["answers"]]
    return "\n".join(lines)


def main() -> int:
    """Extend a record; 1 if a law is broken, or a model died or ran out of time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path, help="file to extend, a line for each type and attention")
    parser.add_argument("types", nargs="*", help="model types, all by default")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    options = parser.parse_args()
    lines = options.record.read_text(encoding="utf-8").splitlines() if options.record.exists() else []
    records = [json.loads(line) for line in lines]
    done = {(one["type"], one["attention"], one["dtype"]) for one in records}
    torch.set_num_threads(1)
    asked("bert", "eager", "float32")  # the imports that all types need happen once, before the forks
    with options.record.open("a", encoding="utf-8") as file:
        for model_type in options.types or sorted(CONFIG_MAPPING.keys(), key=lambda name: zlib.crc32(name.encode())):
            for implementation in IMPLEMENTATIONS:
                if (model_type, implementation, options.dtype) in done:
                    continue
                record = apart(model_type, implementation, options.dtype)
                records.append(record)
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
                file.flush()
                if is_broken(record) or record["state"] in WRONG:
                    print(
                        f"{model_type:32} {implementation:6} {record['state']} {record.get('answers', '')}", flush=True
                    )
    print(tally(records))
    return int(any(is_broken(one) or one["state"] in WRONG for one in records))


if __name__ == "__main__":
    sys.exit(main())

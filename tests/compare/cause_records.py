"""What `diff` says of planted differences, as JSON: names, stages, a, b, sentences, share explained.

A change of the causes that changes none of these lines changed nothing that a reader sees:

    python -m tests.compare.cause_records write HERE.json [programs planted pairs]
    python -m tests.compare.cause_records compare BEFORE.json AFTER.json

`programs` are programs without a model: every suspicion, and what each makes of A's program. `planted` are all small
models of `tests/compare/ports` in one layer, `pairs` those of two causes. A part of `programs` is committed
(`causes/records.json`) and is written anew by `write tests/compare/causes/records.json sample`.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from sqrtdk.compare.causes import CAUSES
from sqrtdk.compare.inside.program import Program
from sqrtdk.compare.inside.suspect import Sides, Suspicion
from tests.compare import formula_cases
from tests.compare.causes.vector_plants import Plant, cases, plants, style_of
from tests.compare.causes.vector_programs import differ, entering, program, sides
from tests.compare.ports.pairs import Case, compare, near_pairs, pairs_of_causes
from tests.compare.ports.planted import cases as port_cases

HOME = Path(__file__).parent / "causes" / "records.json"
NEAR = 1e-3  # shares that are so near are the same
SAMPLE = 3  # of the programs one in so many is committed
EXACT = 1e-9  # what is left of a difference of float64: nothing
Said = list[list[Any]]
Records = dict[str, Said]


def _said(found: Suspicion) -> list[Any]:
    return [found.name, found.stage, found.a, found.b, found.text]


def _all(both: Sides) -> list[Suspicion]:
    return [suspicion for suspect in CAUSES.values() for suspicion in suspect(both)]


def _one_after_another(a: Program, both: Callable[[Program], Sides]) -> tuple[list[Suspicion], Program]:
    """Each cause is asked what is left, in the order of the table, and what it says is done."""
    found = []
    for suspect in CAUSES.values():
        for suspicion in list(suspect(both(a))):
            a = suspicion.change(a)
            found.append(suspicion)
    return found, a


def _of_vectors(name: str, style: str) -> tuple[Plant, Program]:
    torch.manual_seed(0)
    return next(plant for plant in plants() if plant.name == name), program(style_of(style))


def _vector(name: str, style: str, second: str | None = None) -> Said:
    plant, a = _of_vectors(name, style)
    b = plant.change(a)
    if second is not None:
        b = next(plant for plant in plants() if plant.name == second).change(b)
    said: Said = []
    for one, other in ((a, b), (b, a)):
        alone = _all(sides(one, other))
        found, changed = _one_after_another(one, lambda now, other=other: sides(now, other))  # type: ignore[misc]
        left = differ(changed, other, entering())
        said += [[_said(s) for s in alone], [s.name for s in found], left < EXACT]
    return said


def _formula(first: formula_cases.Case, second: formula_cases.Case | None = None) -> Said:
    rows, keys, formula = formula_cases.BASES[first.base]
    planted = first.plant(formula)
    planted = planted if second is None else second.plant(planted)
    said: Said = []
    for one, other in ((formula, planted), (planted, formula)):
        start = formula_cases.trial(one, other, rows, keys)
        found, changed = _one_after_another(start.sides.a, lambda now, start=start: _with_a(start.sides, now))  # type: ignore[misc]
        left = start.left(changed)
        said += [[_said(s) for s in start.suspicions()], [s.name for s in found], left <= start.tiny]
    return said


def _with_a(both: Sides, a: Program) -> Sides:
    return Sides(a, both.b, both.head_dim, both.model_dim, both.heads, both.self_attention)


def programs() -> Iterator[tuple[str, Callable[[], Said]]]:
    """Programs with one cause or two, without a model."""
    for name, style in cases():
        yield f"{name}, {style}", lambda name=name, style=style: _vector(name, style)  # type: ignore[misc]
    torch.manual_seed(0)
    fitting = {plant.name: plant.fits for plant in plants()}
    for number, (one, two) in enumerate(itertools.permutations(fitting, 2)):
        both = [style for style in fitting[one] if style in fitting[two]]
        if both and one.split(":")[0] != two.split(":")[0]:
            style = both[number % len(both)]
            yield f"{one} + {two}, {style}", lambda a=one, b=two, style=style: _vector(a, style, b)  # type: ignore[misc]
    for at, case in enumerate(formula_cases.CASES):
        yield f"{at} {case.base}: {case.name}", lambda case=case: _formula(case)  # type: ignore[misc]
    for (i, first), (j, second) in itertools.permutations(enumerate(formula_cases.CASES), 2):
        if first.base == second.base and first.name != second.name:
            yield (
                f"{i} + {j} {first.base}: {first.name} + {second.name}",
                lambda first=first, second=second: _formula(first, second),  # type: ignore[misc]
            )


def sample() -> Iterator[tuple[str, Callable[[], Said]]]:
    """The committed part of `programs`: one cause each."""
    return itertools.islice((case for case in programs() if " + " not in case[0]), 0, None, SAMPLE)


def _models(case: Case) -> Said:
    report = compare(case.base, case.other(), **case.common)
    return [
        [pair.site_a, pair.same, pair.first_stage, pair.explained]
        + [[c.name, c.stage, c.a, c.b, c.text, c.explained] for c in pair.causes]
        for pair in report.pairs
    ]


def planted() -> Iterator[tuple[str, Callable[[], Said]]]:
    """Every cause on every base, in one layer where the planting is not about layers."""
    for cause, planting, base in port_cases():
        case = Case(base, ((cause, planting),), single=True)
        yield case.name, lambda case=case: _models(case)  # type: ignore[misc]


def pairs() -> Iterator[tuple[str, Callable[[], Said]]]:
    """Two causes at once: of one group, and drawn at random."""
    for number, case in enumerate([*near_pairs(), *pairs_of_causes(40, seed=1)]):
        single = Case(case.base, case.planted, single=True)
        yield f"{number} {case.name}", lambda case=single: _models(case)  # type: ignore[misc]


GROUPS = {"programs": programs, "planted": planted, "pairs": pairs, "sample": sample}


def record(make: Callable[[], Said]) -> Said:
    """What is said of a case, as JSON has it; of one that raises its error."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            said: Said = json.loads(json.dumps(make()))
        except Exception as error:
            said = [[type(error).__name__, str(error)]]
    return said


def differences(before: Any, after: Any) -> bool:
    """Whether two records say something else; numbers count to a thousandth."""
    if isinstance(before, list) and isinstance(after, list):
        return len(before) != len(after) or any(map(differences, before, after))
    numbers = isinstance(before, float | int) and isinstance(after, float | int)
    if numbers and not isinstance(before, bool) and not isinstance(after, bool):
        return not math.isclose(before, after, rel_tol=NEAR, abs_tol=NEAR * NEAR)
    return bool(before != after)


def write(path: Path, groups: Iterable[str]) -> None:
    """Write the records of some groups."""
    records: Records = {}
    for group in groups:
        before = time.process_time()
        for name, make in GROUPS[group]():
            records[f"{group}: {name}"] = record(make)
        print(f"{group}: {len(records)} records so far, {time.process_time() - before:.0f} s")
    lines = [f"{json.dumps(name)}: {json.dumps(said)}" for name, said in records.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Write records, or compare two files of them."""
    if arguments[0] == "write":
        write(Path(arguments[1]), arguments[2:] or ("programs", "planted", "pairs"))
        return 0
    before, after = (json.loads(Path(path).read_text(encoding="utf-8")) for path in arguments[1:3])
    names = [name for name in before if name in after]
    wrong = [name for name in names if differences(before[name], after[name])]
    for name in wrong:
        print(f"{name}\n  before {before[name]}\n  after  {after[name]}")
    lost = set(before) ^ set(after)
    print(f"{len(names)} compared, {len(wrong)} differ, {len(lost)} in one file alone")
    return int(bool(wrong or lost))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

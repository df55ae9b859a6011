"""Weights that a program makes of whole numbers: a quantised table and its scales become a matrix before it is read.

parameters  wq.i int8 (64, 64), wq.s float32 (64, 1)
steps       convert(wq.i) -> mul(., wq.s) -> dot(x, .)
weight      what `dot` reads, by the name of its whole numbers: wq.i
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from sqrtdk.frontends.program import FlatProgram, FlatStep, Literal, RunDtypes, fixed_tensors, held_tensor

TABLE_LOOKUPS = ("gather", "Gather", "embedding", "GET_ROWS")  # operations that pick rows of a table
_MOST_LOOKUPS = 2**14  # of the steps behind one


def folded_weights(
    program: FlatProgram, modules: Mapping[str, nn.Module], inputs: Sequence[Tensor]
) -> tuple[dict[str, Tensor], frozenset[str]]:
    """Return the matrices that a program makes of its whole numbers, and the parameters that nothing else reads.

    Args:
        program: The program.
        modules: The modules by path, which hold its parameters.
        inputs: Those that the program was traced for.

    Returns:
        The matrices by the names of the whole numbers, numbered where one gives several, as a stack of layers does; and
        the names of the parameters that went into them alone. Nothing, where no parameter is a matrix of whole numbers.
    """
    held = {ref: held_tensor(modules, name) for ref, name in program.parameters.items()}
    whole = {ref: name for ref, name in program.parameters.items() if _is_matrix(held[ref], whole=True)}
    if not whole:
        return {}, frozenset()
    fixed = held | fixed_tensors(program.constants, RunDtypes())
    origins = dict.fromkeys(program.constants, "") | {ref: whole.get(ref, "") for ref in held}  # names of whole numbers
    folded: list[FlatStep] = []  # what comes of parameters and constants alone
    read: dict[int, None] = {}  # what the other steps read
    for step in program.steps:
        reads = _references(step)
        # codes pick from a list of numbers; places pick rows of a weight, as the buckets of a position bias do
        picks_rows = step.name in TABLE_LOOKUPS and reads[0] in held and held[reads[0]].dim() > 1
        if all(ref in origins for ref in reads) and not picks_rows:
            folded.append(step)
            origins |= dict.fromkeys(step.gives, next((origins[ref] for ref in reads if origins[ref]), ""))
        else:
            read |= dict.fromkeys(reads)
    read |= dict.fromkeys(ref for ref in program.outputs if type(ref) is int)
    wanted = [ref for ref in read if origins.get(ref) and ref not in held]
    values = _values(_leading_to(wanted, folded)[0], wanted, fixed)
    matrices = [ref for ref in wanted if _is_matrix(values[ref])]
    count, at = Counter(origins[ref] for ref in matrices), Counter[str]()
    found = {}
    for ref in matrices:
        name = origins[ref]
        found[name if count[name] == 1 else f"{name}[{at[name]}]"] = values[ref]
        at[name] += 1
    tables, rows = _tables(program, whole, fixed, inputs)
    _, parts = _leading_to(matrices, folded)
    _, others = _leading_to(read.keys() - {*matrices, *rows}, folded)
    alone = (parts | rows) - others
    return tables | found, frozenset(program.parameters[ref] for ref in alone if ref in program.parameters)


def _tables(
    program: FlatProgram, whole: Mapping[int, str], fixed: Mapping[int, Tensor], inputs: Sequence[Tensor]
) -> tuple[dict[str, Tensor], set[int]]:
    """Return the table of whole numbers that tokens pick rows of, as the program makes it; and what it is made of."""
    for ids, example in zip(program.inputs, inputs, strict=False):
        if example.is_floating_point() or not example.numel():
            continue
        picked: dict[int, frozenset[int]] = {ref: frozenset() for ref in (*fixed, ids)}  # from which tables
        of_tokens = {ids}
        for step in program.steps:
            reads = _references(step)
            if not all(ref in picked for ref in reads):
                continue
            if any(ref in of_tokens for ref in reads):
                of_tokens |= {*step.gives}
            tables = frozenset(table for ref in reads for table in picked[ref])
            if step.name in TABLE_LOOKUPS and reads[0] in fixed and reads[-1] in of_tokens:
                tables |= {reads[0]}
            picked |= dict.fromkeys(step.gives, tables)
        parts = {table for tables in picked.values() for table in tables}
        made = next((ref for ref, tables in picked.items() if tables == parts), None)
        names = [whole[ref] for ref in parts if ref in whole]
        if len(names) == 1 and made is not None:
            count = min(len(fixed[ref]) for ref in parts)
            rows = _rows(_leading_to([made], program.steps)[0], ids, made, count, example, fixed)
            if rows is not None:
                return {names[0]: rows}, parts
    return {}, set()


def _rows(
    steps: list[FlatStep], ids: int, made: int, count: int, example: Tensor, fixed: Mapping[int, Tensor]
) -> Tensor | None:
    """Return what steps make of each token, (tokens, width), in runs of the tokens that the program was traced for."""
    if count > _MOST_LOOKUPS * example.numel():
        return None
    found = []
    for tokens in torch.split(torch.arange(count), example.numel()):
        given = torch.zeros(example.numel(), dtype=example.dtype)
        given[: len(tokens)] = tokens
        values = _values(steps, [made], {**fixed, ids: given.reshape(example.shape)})[made]
        found.append(values.flatten(0, example.dim() - 1)[: len(tokens)])
    rows = torch.cat(found)
    return rows if _is_matrix(rows) else None


def _references(step: FlatStep) -> list[int]:
    return [ref for ref in step.reads if type(ref) is int]


def _leading_to(refs: Iterable[int], steps: Sequence[FlatStep]) -> tuple[list[FlatStep], set[int]]:
    """Return the steps that some references come of, in order, and all references that these read or give."""
    needed, kept = set(refs), []
    for step in reversed(steps):
        if needed & set(step.gives):
            kept.append(step)
            needed |= {*_references(step)}
    return kept[::-1], needed


def _values(steps: Sequence[FlatStep], wanted: Iterable[int], fixed: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return what steps give at some references, in the program's own dtypes; all else goes when it was read last."""
    numbers, kept = RunDtypes(), set(wanted)
    last = {ref: at for at, step in enumerate(steps) for ref in _references(step)}
    known: dict[int, Tensor] = {}
    with torch.no_grad():
        for at, step in enumerate(steps):
            reads = [read.value if isinstance(read, Literal) else known[read] if read in known else fixed[read]
                     for read in step.reads]  # fmt: skip
            made = step.run(numbers, *reads)
            results = tuple(made) if isinstance(made, tuple | list) else (made,)
            for ref, dtype, result in zip(step.gives, step.dtypes, results, strict=True):
                known[ref] = result if dtype is None else numbers.cast(result, dtype)
            for ref in (*_references(step), *step.gives):
                if last.get(ref, at) <= at and ref not in kept:
                    known.pop(ref, None)
    return known


def _is_matrix(value: Tensor, *, whole: bool = False) -> bool:
    return value.is_floating_point() is not whole and value.dim() > 1

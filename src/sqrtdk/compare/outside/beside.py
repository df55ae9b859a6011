"""What a module computes beside its attention: the part of it behind (`o_proj`), and what joins in between (`g_proj`).

In `o_proj(heads * sigmoid(g_proj(x)))` the causes of an attention explain `heads`, and no more. So `o_proj` gets B's
input and is walked, and so is `g_proj`. Code between modules is read off the numbers (`sqrtdk.compare.outside.gates`),
or is the same because both sides run one class with equal parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from torch import Tensor, nn

from sqrtdk._wrappers import named_modules, submodule
from sqrtdk.compare.outside.changes import is_alike
from sqrtdk.compare.outside.gates import GatedModule, numbers_at
from sqrtdk.compare.outside.modules import ModuleStep, align_steps
from sqrtdk.compare.sides import ModelSide
from sqrtdk.modules.calls import CallPlace

# by site of A: the path of the module behind its attention, and the inputs that B gives to its calls
Behind = dict[str, tuple[str, list[tuple[ModuleStep, tuple[Tensor, ...]]]]]


def modules_behind(
    a: Sequence[ModuleStep], b: Sequence[ModuleStep], own: Mapping[CallPlace, CallPlace], sites: Mapping[str, str]
) -> Behind:
    """Return the modules of A behind its attentions, with what B gives them.

    That is the inner module whose output is that of the whole: `o_proj` of `o_proj(heads)`. A site of which any call
    has none is left out.

    Args:
        a: calls of A.
        b: calls of B.
        own: attentions that differ, by A's place.
        sites: paired sites of all attentions.
    """
    partners = {other.number: one for one, other in align_steps(a, b, sites)}
    found: Behind = {}
    lost: set[str] = set()
    for (site, _), place_b in own.items():
        last = last_inner(b, place_b)
        mine = None if last is None else partners.get(last.number)
        kept = () if last is None else last.takes
        whole = bool(kept) and all(one.stride == 1 for one in kept) and mine is not None
        if not whole or mine is None or [x.shape for x in mine.takes] != [x.shape for x in kept]:
            lost.add(site)
            continue
        path, both = found.setdefault(site, (mine.place[0], []))
        both.append((mine, tuple(one.values.view(one.shape) for one in kept)))
        lost |= {site} if path != mine.place[0] else set()
    return {site: what for site, what in found.items() if site not in lost}


def last_inner(steps: Sequence[ModuleStep], place: CallPlace) -> ModuleStep | None:
    """Return the first call inside the call at `place` whose output is that call's output; None if there is none.

    Args:
        steps: all module calls of a run, in the order in which they end.
        place: module path and number of the outer call.
    """
    end = next((i for i, step in enumerate(steps) if step.place == place), None)
    if end is None or not steps[end].gives:
        return None
    whole = steps[end]
    for step in sorted(steps[:end], key=lambda step: step.number):
        if step.number > whole.number and step.gives and step.gives[0] is whole.gives[0]:
            return step
    return None


def numbers_before(
    runs: Sequence[Sequence[ModuleStep]], places: Sequence[CallPlace], sides: Sequence[ModelSide]
) -> tuple[GatedModule, GatedModule] | None:
    """Return what enters the last inner module of an attention, such as `o_proj`, on both sides.

    Args:
        runs: module calls of A and of B.
        places: the attention's module and number of the call, in A and in B.
        sides: A and B.

    Returns:
        For A and for B; None if there is no such module or not all numbers were kept.
    """
    ends = [last_inner(run, place) for run, place in zip(runs, places, strict=True)]
    calls = [next((step for step in run if step.place == at), None) for run, at in zip(runs, places, strict=True)]
    if ends[0] is None or ends[1] is None or calls[0] is None or calls[1] is None:
        return None
    if not ends[0].takes or not ends[1].takes:
        return None
    a, b = (calls[0], runs[0]), (calls[1], runs[1])
    return numbers_at([(ends[0].takes[0], ends[1].takes[0])], a, b, sides[1].calls, sides[0].calls)


def parts_beside(side: ModelSide, site: str) -> Iterator[str]:
    """Yield paths of modules inside an attention that hold parameters and are no projection of q, k or v.

    Args:
        side: the side; nothing is yielded if it is a file.
        site: path of the attention's module.
    """
    known = {name.rpartition(".")[0] for name in _read_by(side, site)}
    for path, module in _inner(side, site):
        if path not in known and any(True for _ in module.parameters(recurse=False)):
            yield path


def is_one_code(a: ModelSide, b: ModelSide, sites: tuple[str, str], named: Collection[str]) -> bool:
    """Return whether the modules of an attention do the same on both sides, apart from q, k and v.

    They do if the same paths hold modules of one class with equal contents.

    Args:
        a: side A.
        b: side B.
        sites: path of the attention's module in A and in B.
        named: paths of A whose differences are already known; their contents are not compared. The parameters of q, k
            and v are not compared either: their differences are causes of the attention.
    """
    parts = [
        {path.removeprefix(site): module for path, module in _inner(side, site)}
        for side, site in zip((a, b), sites, strict=True)
    ]
    if not parts[0] or parts[0].keys() != parts[1].keys():
        return False
    read = _read_by(a, sites[0])
    for path, module in parts[0].items():
        own, other = f"{sites[0]}{path}", parts[1][path]
        names = [name for name, _ in module.named_parameters(recurse=False) if f"{own}.{name}" in read]
        # Of Qwen3-Next's q_proj q reads half of the rows, and a gate the others.
        part = isinstance(module, nn.Linear) and any(len(read[f"{own}.{x}"]) < module.out_features for x in names)
        if type(module) is not type(other) or (part and own not in named):
            return False
        leaf = next(module.children(), None) is None
        if own not in named and not (names and leaf) and not is_alike(module, other, [*names, "in_proj_bias"]):
            return False
    return True


def _read_by(side: ModelSide, site: str) -> dict[str, set[int]]:
    """Return the names of the parameters of q, k and v and the rows that they read; no rows of the gains of norms."""
    rows: dict[str, set[int]] = {}
    for call in side.calls:
        if call.site != site:
            continue
        for vector in (call.query, call.key, call.value):
            if vector.projection is not None:
                rows.setdefault(vector.projection.name, set()).update(vector.projection.features.flatten().tolist())
            for step in vector.steps:
                if step.gain:
                    rows.setdefault(step.gain, set())
    return rows


def _inner(side: ModelSide, site: str) -> Iterator[tuple[str, nn.Module]]:
    if side.module is not None:
        yield from ((f"{site}.{path}".strip("."), part) for path, part in named_modules(submodule(side.module, site)))

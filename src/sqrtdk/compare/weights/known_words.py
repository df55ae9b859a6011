"""Says what is known to lie between the weights of both sides: adapters, roundings, and the mistakes in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from sqrtdk.compare.weights.pairing import NUMBER_OF_LAYER
from sqrtdk.compare.weights.records import KnownChange, KnownChanges, WeightFault
from sqrtdk.compare.weights.updates import role_of
from sqrtdk.messages import Message, joined

_MOST_KINDS_NAMED = 4  # kinds of weights
_MOST_SHOWN = 3
_OF_ADAPTERS = ("LoRA", "rsLoRA", "DoRA", "IA3", "whole")
_OF_ONE_WEIGHT = ("rounding_factor", "adapter_dtype", "adapter_not_loaded")  # whose sentence on one weight is another
_FACTOR_CODES = ("twice", "scale", "unscaled", "root", "no_root", "reversed")


def known_sentences(known: KnownChanges | None) -> list[Message]:
    """Return the sentences on known changes, mistakes first; none if nothing is known.

    Args:
        known: the changes.
    """
    if known is None:
        return []
    sentences = [_fault(fault, known) for fault in known.faults]
    for change in known.changes:
        # rounded weights that lack the adapter are rounded
        of_adapter = _is_of_adapter(change)
        faults = [fault for fault in known.faults if fault.name.startswith("adapter") == of_adapter]
        wrong = {name for fault in faults for name in fault.weights}
        right = [name for name in change.weights if name not in wrong]
        if right:
            sentences.append(_change(change, right, known))
    if known.undecided:
        sentences.append(Message("compare.known.adapter_undecided", where=places(known.undecided)))
    # a weight with an adapter and a rounding is there twice, each time with both
    each = dict(cost for change in known.changes for cost in change.costs)
    costs = sorted(each.items(), key=lambda item: -item[1])
    if known.cost and costs:
        sentences.append(_cost(known, costs))
    return sentences


def _change(change: KnownChange, names: Sequence[str], known: KnownChanges) -> Message:
    words: dict[str, str | int | float] = {"kind": change.kind, "where": places(names), "size": _percent(change.size)}
    if not _is_of_adapter(change):
        one = "_one" if len(names) == 1 else ""
        return Message(f"compare.known.rounded{one}", steps=f"{change.steps or 0.0:.2f}", **_sides(known), **words)
    of_a = "_a" if known.side == "A" else ""
    if not change.rank:
        return Message(f"compare.known.adapter_plain{of_a}", **words)
    ranks = joined([str(rank) for rank in change.rank], "comma")
    scales = joined([f"{scale:.4g}" for scale in change.scale], "comma")
    return Message(f"compare.known.adapter{of_a}", rank=ranks, scale=scales, **words)


def _is_of_adapter(change: KnownChange) -> bool:
    return bool(change.rank) or any(kind in _OF_ADAPTERS for kind in change.kind.split(" + "))


def _sides(known: KnownChanges) -> dict[str, str]:
    return {"coarse": known.coarse, "fine": "A" if known.coarse == "B" else "B"}


def _cost(known: KnownChanges, costs: Sequence[tuple[str, float]]) -> Message:
    total = _percent(known.cost or 0.0)
    if len(costs) == 1:
        return Message("compare.known.cost", total=total, side=known.changed)
    texts = [Message("compare.known.cost_of", name=_last(role), cost=_percent(cost)) for role, cost in costs]
    return Message("compare.known.costs", total=total, side=known.changed, costs=joined(texts[:_MOST_SHOWN], "comma"))


def _fault(fault: WeightFault, known: KnownChanges) -> Message:
    words: dict[str, str | int | float] = {"where": places(fault.weights)}
    if fault.name.startswith("rounding"):
        words |= _sides(known)
    if fault.name == "adapter_untold":
        words |= {"rank": known.changes[0].rank[0], "size": _percent(known.changes[0].size)}
    if fault.name == "adapter_factor":
        codes = [code for code in fault.codes if code in _FACTOR_CODES]
        texts = [Message(f"compare.known.factor.{code}") for code in codes]
        words |= {"factor": f"{fault.factor or 0.0:.4g}"}
        if texts:
            return Message("compare.known.adapter_factor_by", why=joined(texts, "or"), **words)
    if fault.factor is not None and not fault.name.startswith("adapter"):
        words |= {"factor": f"{fault.factor:.4g}"}
    if fault.other:
        pairs = list(zip(fault.weights, fault.other, strict=False))
        has = "compare.known.has" if fault.name.startswith("adapter") else "compare.known.has_scales"
        pairs = [(own, other) for own, other in pairs if own != other]
        if not pairs:
            return Message("compare.known.rounding_scales_moved", **words, share=_percent(fault.share or 0.0))
        texts = [Message(has, own=_bare(own), other=_bare(other)) for own, other in pairs[:_MOST_SHOWN]]
        more = len(pairs) - _MOST_SHOWN
        shown = joined(texts, "comma" if more > 0 else "and")
        words["where"] = Message("compare.weights.and_more", names=shown, count=more) if more > 0 else shown
    if fault.dtype:
        words |= {"dtype": fault.dtype}
    if fault.share is not None:
        words |= {"share": _percent(fault.share)}
    one = "_one" if len(fault.weights) == 1 and fault.name in _OF_ONE_WEIGHT else ""
    return Message(f"compare.known.{fault.name}{one}", **words)


def places(names: Sequence[str]) -> Message | str:
    """Return weights in a few words: "`q_proj` and `v_proj` of 12 layers"; all of it if there is one alone.

    Example:
        >>> str(places(["h.0.q.weight", "h.1.q.weight", "h.0.v.weight", "h.1.v.weight"]))
        '`q` and `v` of 2 layers'
        >>> str(places(["h.1.q.weight"]))
        '`h.1.q`'
    """
    if len(names) == 1:
        return _bare(names[0])
    alone = [name for name in names if not NUMBER_OF_LAYER.findall(name)]
    if alone and len(alone) < len(names):
        numbered = [name for name in names if name not in set(alone)]
        return joined([places(numbered), *(_last(name) for name in alone)], "and")
    roles = Counter(map(role_of, names))
    lasts = list(dict.fromkeys(_last(role) for role in roles))
    shown = joined(lasts[:_MOST_KINDS_NAMED], "and" if len(lasts) <= _MOST_KINDS_NAMED else "comma")
    if len(lasts) > _MOST_KINDS_NAMED:
        shown = Message("compare.weights.and_more", names=shown, count=len(lasts) - _MOST_KINDS_NAMED)
    layers = {tuple(NUMBER_OF_LAYER.findall(name)) for name in names} - {()}
    if not layers:
        return shown
    if len(layers) == 1:
        return Message("compare.known.of_layer", names=shown, layer=".".join(next(iter(layers))))
    return Message("compare.known.of_layers", names=shown, count=len(layers))


def _bare(name: str) -> str:
    return f"`{name.removesuffix('.weight')}`"


def _last(role: str) -> str:
    return f"`{role.removesuffix('.weight').rpartition('.')[2]}`"


def _percent(share: float) -> str:
    return f"{float(f'{100 * share:.2g}'):g}%"

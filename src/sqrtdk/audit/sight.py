"""Which keys the rows of a call see, and must not see: leaks of the future, and shapes of a mask that nobody wants.

- a leak of the future: critical. Rows of self-attention that see keys after their own and none before; a causal mask
  off by one, in any head or sequence, which shows every row the key after its own; a key after the row's own, or
  weight above 1e-4 on such keys, in a module that says it is causal, also where the keys begin before the rows (a
  cache). What declares a prefix, two directions, blocks or as long a lookahead (`audit.lookahead`) is believed;
- rows that see a few keys after their own, and all before: fail, as a lookahead that nothing declares;
- a causal mask off by one that hides a row's own key: warn.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from sqrtdk.audit.configs import field
from sqrtdk.tracing.records import AttentionCall, Mask

WEIGHT = 1e-4
LEAST_ROWS = 4  # below it a few visible keys fit many shapes
SOURCE = "Vaswani et al. 2017, section 3.2.3: an illegal connection has weight 0"

Fault = tuple[str, float, float, str, str, str]  # severity, value, threshold, message, fix, source


def says_causal(call: AttentionCall, module: nn.Module | None) -> bool:
    """Whether the module says of itself that it is causal, and the call is one to which that applies."""
    said = any(field(module, name) is True for name in ("is_causal", "causal"))
    return said and call.self_attention is not False and 1 < call.query_len <= call.key_len


def leak(call: AttentionCall, declared: float, static: bool) -> Iterable[Fault]:
    """A causal call whose rows see keys after their own, beyond a declared lookahead.

    Where there are more keys than rows, the last row belongs to the last key at the earliest.
    """
    mask, before = call.mask, call.key_len - call.query_len
    message, value = None, call.future_weight
    merged = bool(call.blocks) and call.stats is None  # of no softmax as a whole
    if mask is not None and mask.least is not None and -mask.least - before > max(declared, 0.0):
        message = f"rows of a causal module see up to {-mask.least - before} keys after their own"
        value = float(-mask.least - before) if value is None else value
    elif value is not None and value > WEIGHT and not declared:
        message = f"a causal module gives {value:.3g} of its weight to future keys"
    elif mask is None and (before or static or merged) and value is None and not declared:
        message, value = "a causal module has no mask: rows see the keys after their own", float(call.query_len - 1)
    if message is not None and value is not None:
        fix = "pass the causal mask to this call (a custom attention function must register its mask function too)"
        yield "critical", value, WEIGHT, message, fix, SOURCE


def shape(call: AttentionCall, declared: float) -> Fault | None:
    """A shape of the visible keys that nobody wants of self-attention, told from the least and greatest i - j."""
    mask, rows = call.mask, call.query_len
    if mask is None or mask.least is None or mask.greatest is None:
        return None
    if call.self_attention is False or rows != call.key_len or rows < LEAST_ROWS:
        return None
    return _inverted(mask, rows) or _ahead(mask, rows, declared) or _behind(mask, rows)


def _inverted(mask: Mask, rows: int) -> Fault | None:
    assert mask.least is not None
    assert mask.greatest is not None
    least = float(mask.least)
    if mask.greatest < 0:
        return (
            "critical", least, 0.0, "the mask looks inverted: rows see the future and not the past",
            "negate the mask: True lets a key take part in SDPA, and hides it in nn.MultiheadAttention", SOURCE,
        )  # fmt: skip
    if mask.band and mask.greatest == 0 and least <= 1 - rows:
        return (
            "critical", least, 0.0, "the mask looks inverted: rows see themselves and the future, not the past",
            "use tril, or negate and shift the mask, if the model is meant to be causal", SOURCE,
        )  # fmt: skip
    return None


def _ahead(mask: Mask, rows: int, declared: float) -> Fault | None:
    """Every row sees a few keys after its own, and all before."""
    if mask.ahead_by_one and declared < 1:
        where = "" if mask.band else " in some heads or sequences"
        return (
            "critical", -1.0, 0.0, f"the causal mask is off by one{where}: every row sees the key after its own",
            "hide the key after the row's own: tril(diagonal=0)", SOURCE,
        )  # fmt: skip
    assert mask.least is not None
    some = mask.band and mask.greatest == rows - 1 and -rows / 2 < mask.least < -1
    if some and declared < -mask.least:
        return (
            "fail", float(mask.least), 0.0, f"every row sees the {-mask.least} keys after its own, and all before",
            "tril(diagonal=0) if the model is meant to be causal; a lookahead that is meant is declared: "
            f"right_context = {-mask.least} in the config", SOURCE,
        )  # fmt: skip
    return None


def _behind(mask: Mask, rows: int) -> Fault | None:
    """No row sees its own key, nor perhaps a few before, but all before these."""
    assert mask.least is not None
    if not mask.band or mask.greatest != rows - 1 or mask.least <= 0:
        return None
    count, hidden, first = str(mask.least), f"the {mask.least} keys up to its own", f"the first {mask.least} rows see"
    if mask.least == 1:
        count, hidden, first = "one", "its own key", "the first row sees"
    return (
        "warn", float(mask.least), 0.0, f"the causal mask is off by {count}: no row sees {hidden}, and {first} nothing",
        "let each row see its own key: tril(diagonal=0)", SOURCE,
    )  # fmt: skip


def own_key(call: AttentionCall) -> Fault | None:
    """A causal mask without its diagonal, rightly so where q and k are one projection (Kitaev et al. 2020, Reformer).

    The product of a token with itself would outweigh every other. The first row, which sees no other, sees itself.
    """
    mask, rows, groups = call.mask, call.query_len, call.batch * call.heads
    if not call.shared_qk or mask is None or rows != call.key_len or rows < LEAST_ROWS:
        return None
    if not mask.band or mask.least != 1 or mask.greatest != rows - 1:
        return None
    return (
        "note", float(groups), 0.0,
        f"{groups} of {groups * rows} rows see no key but their own, which is hidden: q and k are one projection",
        "hide a row's own key less than the others, so that the first row sees itself", SOURCE,
    )  # fmt: skip

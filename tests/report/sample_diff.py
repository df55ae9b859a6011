"""Synthetic reports of comparisons that look like real ones: what the drawing code is tested on."""

from __future__ import annotations

import dataclasses
import math
import random

from sqrtdk.compare.inside.suspect import STAGES
from sqrtdk.compare.paragraphs import paragraphs
from sqrtdk.compare.records import (
    CANCELS,
    Cause,
    DiffReport,
    MaskPicture,
    PairDiff,
    Scatter,
    SideInfo,
    StageDiff,
    Unpaired,
)
from sqrtdk.messages import Message
from tests.report.sample_report import ENVIRONMENT, EVIL

CAPPED = "softmax(softcap(0.125 * rope(q).rope(k), 50) + causal)"
PLAIN = "softmax(0.125 * rope(q).rope(k) + causal)"
SOFTCAP = Cause("softcap", 50.0, None, 0.9999, "leaves out the softcap (50)", "softcap")
ABSENT = ("query norm", "key norm", "bias", "sinks")


def scatter(head: int = 0, seed: int = 0, cap: float = 50.0, spread: float = 30.0, points: int = 220) -> Scatter:
    """Logits of A with a softcap, of B without."""
    rng = random.Random(seed + 31 * head)
    rows = tuple(rng.randrange(64) for _ in range(points))
    keys = tuple(rng.randrange(row + 1) for row in rows)
    b = tuple(rng.gauss(0, spread) for _ in rows)
    return Scatter(head, rows, keys, tuple(cap * math.tanh(z / cap) for z in b), b)


def stages(
    *differ: str, unknown: tuple[str, ...] = (), words: dict[str, tuple[str, str]] | None = None
) -> tuple[StageDiff, ...]:
    """Every stage; those named differ, those without a step on either side are not compared."""
    every = []
    for index, stage in enumerate(STAGES):
        if stage in unknown:
            every.append(StageDiff(stage, None, reason="not known of B: a trace file of q, k, v and output"))
        elif words and stage in words:
            every.append(StageDiff(stage, stage not in differ, None, None, *words[stage]))
        elif stage in differ:
            every.append(StageDiff(stage, False, 0.31 + index / 100, 4e-6))
        elif stage in ABSENT:
            every.append(StageDiff(stage, True, None, None, "none", "none"))
        else:
            every.append(StageDiff(stage, True, 1.3e-7 * (1 + index % 3), 2e-6))
    return tuple(every)


def pair(layer: int, **fields: object) -> PairDiff:
    """A pair that is the same, in everything that is not said."""
    site = f"model.layers.{layer}.self_attn"
    one = PairDiff(
        site, site, 0, 0, True, None, None, (), None, 9e-7 + layer * 1e-8, difference=2.1e-7 + layer * 1e-9,
        stages=stages(), formula_a=PLAIN, formula_b=PLAIN,
    )  # fmt: skip
    return dataclasses.replace(one, **fields)  # type: ignore[arg-type]


def differing(layer: int, *causes: Cause, first: str | None, differ: tuple[str, ...], **fields: object) -> PairDiff:
    """A pair with a difference of its own, that its causes explain."""
    found: dict[str, object] = {
        "same": False, "first_stage": first, "causes": causes, "residue": 3.1e-6 + layer * 1e-8, "allowed": 8.2e-6,
        "difference": 0.44, "explained": 0.99999, "stages": stages(*differ, "weights", "output"),
        "scatter": (scatter(0, layer), scatter(3, layer)),
    }  # fmt: skip
    return pair(layer, **(found | fields))


def follower(layer: int, origin: str = "model.layers.0.self_attn") -> PairDiff:
    """A pair that differs as what comes in differs."""
    return pair(
        layer, same=False, first_stage="input", follows_from=origin, residue=2e-7, difference=0.2, explained=None,
        stages=stages("input"),
    )  # fmt: skip


def same(layers: int = 12) -> DiffReport:
    """Nothing differs."""
    return report(tuple(pair(layer) for layer in range(layers)))


def softcap() -> DiffReport:
    """The softcap is missing in every layer."""
    missing = {"formula_a": CAPPED, "formula_b": PLAIN}
    words = {"softcap": ("50", "none")}
    return report(
        tuple(
            differing(layer, SOFTCAP, first="softcap", differ=("softcap",), **missing,
                      stages=stages("softcap", "weights", "output", words=words))
            for layer in range(12)
        )
    )  # fmt: skip


def follows() -> DiffReport:
    """The softcap is missing in the first layer; what comes after follows from it."""
    first = differing(0, SOFTCAP, first="softcap", differ=("softcap",), formula_a=CAPPED, formula_b=PLAIN)
    return report((first, *(follower(layer) for layer in range(1, 12))))


def two_causes() -> DiffReport:
    """Another scale and another rotation in one layer, a mask off by one in the next, with its picture."""
    scale = Cause("scale", 0.125, 0.015625, 0.62, "multiplies by 0.015625 instead of 0.125 (twice)", "scale")
    base = Cause("rope_base", 10000.0, 500000.0, 0.41, "rotates by the base 500000 instead of 10000", "key rotation")
    offset = Cause("mask_offset", "i - j >= 0", "i - j >= -1", 1.0, "shows each row the key after its own", "mask")
    rows = tuple("+" * (row + 1) + "b" * (row < 15) + "." * (14 - row) for row in range(16))
    return report(
        (
            pair(0),
            differing(1, scale, base, first="query rotation", differ=("query rotation", "key rotation", "scale"),
                      formula_a=PLAIN, formula_b=PLAIN.replace("0.125", "0.01562")),
            differing(2, offset, first="mask", differ=("mask",), picture=MaskPicture(48, 48, rows),
                      formula_b=PLAIN.replace("causal", "mask")),
            follower(3, "model.layers.2.self_attn"),
        )
    )  # fmt: skip


def cancelling() -> DiffReport:
    """Stages that differ and cancel, and rows that see no key."""
    permuted = tuple(
        dataclasses.replace(one, same=False, largest=0.3, reason=Message(CANCELS), cancels=True)
        if one.stage in ("query", "key")
        else one
        for one in stages()
    )
    rows = "5 of 24 rows, which see no key, are left out"
    every = tuple(dataclasses.replace(one, reason=rows) if one.stage == "output" else one for one in permuted)
    return report(
        (
            *(pair(layer, stages=every, rows=24, rows_left_out=5) for layer in range(2)),
            pair(2, stages=permuted, rows=24),
            pair(3, rows=24, rows_left_out=1),
        )
    )


def unknown() -> DiffReport:
    """A softcap that explains a part, and a layer that nothing explains."""
    nothing = Cause("unknown", None, None, 0.0, "", "weights")
    partly = dataclasses.replace(SOFTCAP, explained=0.871)
    return report(
        (
            pair(0),
            differing(1, partly, nothing, first="softcap", differ=("softcap",), residue=0.057, explained=0.871),
            differing(2, nothing, first="weights", differ=(), residue=0.44, explained=0.0),
            pair(3),
        )
    )


def unpaired() -> DiffReport:
    """Calls without a partner, other names in B, and a pair of which B tells nothing but q, k, v and output."""
    pairs = tuple(
        dataclasses.replace(pair(layer), site_b=f"transformer.h.{layer}.attn", index_b=layer % 2) for layer in range(4)
    )
    why = "B tells neither the formula nor the output"
    known = ("query", "key", "value")
    blind = stages(unknown=tuple(stage for stage in STAGES if stage not in known))
    lost = pair(4, same=None, reason=why, difference=None, allowed=None, formula_b=None, stages=blind)
    one = report((*pairs, dataclasses.replace(lost, site_b="transformer.h.4.attn")))
    b = SideInfo("b.safetensors", "trace file", "vllm 0.11", None, "bfloat16", "cuda", 7, {"vllm": "0.11.0"})
    return _told(
        dataclasses.replace(
            one, b=b,
            unpaired_a=tuple(Unpaired(f"model.vision.{i}.attn", 0, PLAIN, "no call of its shape") for i in range(3)),
            unpaired_b=(Unpaired("", 0, None, "its logits were not followed"), Unpaired("pool", 1, "softmax(q.k)", "")),
        )
    )  # fmt: skip


def not_finite() -> DiffReport:
    """B holds NaN from the second layer on."""
    nan = math.nan
    broken = (*stages()[:8], StageDiff("scale", False, nan, 2e-6), *stages("weights", "output")[9:])
    dots = Scatter(0, (1, 2, 3), (0, 1, 2), (0.5, -1.0, 2.0), (nan, math.inf, 2.0))
    one = differing(1, first="scale", differ=("scale",), residue=nan, difference=nan, explained=None)
    one = dataclasses.replace(one, stages=broken, scatter=(dots,))
    return report((pair(0), one, follower(2, one.site_a)))


def undecided() -> DiffReport:
    """Nothing differs, and of one pair that could not be judged."""
    why = "dropout ran, and which weights it kept is not known"
    return report((pair(0), pair(1, same=None, reason=why, difference=None, allowed=None)))


def hostile() -> DiffReport:
    """Sides whose every text attacks the page that shows it."""
    cause = Cause(EVIL, EVIL, EVIL, 0.5, EVIL, EVIL)
    strange = (
        StageDiff(EVIL, False, 1.0, 0.1, EVIL, EVIL, EVIL),
        StageDiff("mask", False, None, None, EVIL, EVIL, EVIL),
    )
    one = PairDiff(
        f"h.0.{EVIL}", f"g.0.{EVIL}", 0, 1, False, EVIL, None, (cause,), 0.2, 0.1, 0.4, 0.5, strange,
        f"softmax({EVIL})", f"softmax({EVIL} + 1)", EVIL, (scatter(), scatter(1)), MaskPicture(0, 0, ("+b<", EVIL)),
    )  # fmt: skip
    lost = dataclasses.replace(one, site_a=EVIL, same=None, causes=(), first_stage=None)
    after = dataclasses.replace(one, site_a=f"h.1.{EVIL}", follows_from=f"h.0.{EVIL}", causes=())
    side = SideInfo(EVIL, EVIL, EVIL, EVIL, EVIL, EVIL, 1, {EVIL: EVIL})
    stray = (Unpaired(EVIL, 0, EVIL, EVIL),)
    return _told(
        DiffReport(side, side, (one, after, lost), stray, stray, (), (1, 1), 0, EVIL, {EVIL: EVIL}, "different")
    )


def report(pairs: tuple[PairDiff, ...]) -> DiffReport:
    """Of two sides that have these pairs."""
    versions = {"torch": "2.13.0+cpu", "transformers": "5.23.0"}
    a = SideInfo("org/model-2b", "model", "Gemma2ForCausalLM", "eager", "float32", "cpu", len(pairs), versions)
    b = SideInfo("port.model:make", "model", "Decoder", "sdpa", "float32", "cpu", len(pairs), versions)
    command = "sqrtdk diff org/model-2b port.model:make"
    return _told(DiffReport(a, b, pairs, (), (), (), (1, 1), 0, command, ENVIRONMENT))


def _told(one: DiffReport) -> DiffReport:
    said = paragraphs(one.pairs, one.unpaired_a, one.unpaired_b, one.a, one.b)
    return dataclasses.replace(one, paragraphs=said)


REPORTS = {
    "same": same,
    "softcap": softcap,
    "follows": follows,
    "two_causes": two_causes,
    "cancelling": cancelling,
    "unknown": unknown,
    "unpaired": unpaired,
    "not_finite": not_finite,
    "undecided": undecided,
    "hostile": hostile,
}

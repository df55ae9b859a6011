"""Synthetic reports that look like real ones: what the drawing code is tested on."""

from __future__ import annotations

import dataclasses
import math
import random

from sqrtdk.audit.records import (
    BROKEN,
    KEPT,
    NOT_ASKED,
    UNMEASURED,
    CheckReport,
    Finding,
    JudgedCall,
    LawAnswer,
    ModelInfo,
    health,
)
from sqrtdk.messages import Message
from sqrtdk.stats.heads import HeadStats, Histogram
from sqrtdk.tracing.records import AttentionCall, EffectiveScale, Factor, Mask, NotAttention, NotMeasured, Stage

NAN = math.nan
EVIL = "<script>document.title='owned'</script></script>\"'`&\u202etxt\u2028\n\x1b[31m[red]{{7*7}}"
ENVIRONMENT = {"python": "3.11.2", "torch": "2.13.0+cpu", "platform": "Linux x86_64", "device": "cpu"}


def _normal_histogram(mean: float, std: float, total: int, bins: int = 48) -> Histogram:
    low, high = mean - 4 * std, mean + 4.5 * std
    width = (high - low) / bins
    centres = (low + width * (index + 0.5) for index in range(bins))
    counts = (round(total * width / std / 2.5066 * math.exp(-(((x - mean) / std) ** 2) / 2)) for x in centres)
    return Histogram(low, high, tuple(counts))


def head_stats(
    heads: int = 4, sigma: float = 1.0, keys: int = 256, seed: int = 0, nan_head: int | None = None
) -> HeadStats:
    """Statistics as Gaussian logits of standard deviation `sigma` would roughly give; one head may hold NaN."""
    rng = random.Random(seed)
    columns: dict[str, list[float | int | Histogram]] = {field.name: [] for field in dataclasses.fields(HeadStats)}
    for head in range(heads):
        spread = sigma * rng.uniform(0.6, 1.5)
        mean = rng.gauss(0, 0.4)
        critical = math.sqrt(2 * math.log(keys))
        visible = (keys + 1) / 2
        entropy = max(math.log(visible) - spread**2 / 2.2, 0.1) if spread < critical else 0.4 / spread
        peak = min(0.999, math.exp(-entropy) * 2.2)
        values: dict[str, float | int | Histogram] = {
            "blind_rows": 0,
            "nan_rows": 0,
            "keys": visible,
            "max_logit": mean + spread * critical * 1.1,
            "min_logit": mean - spread * critical,
            "max_abs_logit": abs(mean) + spread * critical * 1.1,
            "max_above_mean": spread * critical * 1.1,
            "mean_logit": mean,
            "std_logit": spread,
            "row_offset": abs(mean) * 1.7,
            "entropy_nats": entropy,
            "entropy_p05": entropy * 0.6,
            "entropy_p50": entropy * 1.02,
            "entropy_p95": entropy * 1.05,
            "entropy_fraction": entropy / math.log(visible),
            "effective_keys": max(1.0, math.exp(entropy) * 0.9),
            "peak": peak,
            "peak_max": min(1.0, peak * 1.6),
            "saturated": 0.0 if peak < 0.5 else min(1.0, peak),
            "jacobian_norm": math.sqrt(max(0.0, peak * (1 - peak))) / 2,
            "logit_histogram": _normal_histogram(mean, spread, 40_000),
            "entropy_histogram": _normal_histogram(entropy, 0.05 * entropy + 0.01, 2 * keys, 32),
        }
        if head == nan_head:
            values = {name: NAN if isinstance(value, float) else value for name, value in values.items()}
            values |= {
                "nan_rows": 2 * keys,
                "keys": 0.0,
                "logit_histogram": Histogram(0.0, 0.0, ()),
                "entropy_histogram": Histogram(0.0, 0.0, ()),
            }
        for name, value in values.items():
            columns[name].append(value)
    tuples = {name: tuple(values) for name, values in columns.items() if name not in ("heads", "rows")}
    return HeadStats(heads=heads, rows=2 * keys, **tuples)  # type: ignore[arg-type]


def judged(
    site: str,
    *,
    ratio: float | None = 1.0,
    head_dim: int = 64,
    heads: int = 4,
    length: int = 256,
    formula: str | None = None,
    verdict: str = "exact",
    mistake: str | None = None,
    declared_by: str | None = None,
    reason: str | None = None,
    stats: HeadStats | None = None,
    stats_reason: str | None = "no weights: static mode",
    **fields: object,
) -> JudgedCall:
    """One judged call, right in everything that is not said."""
    effective = None if ratio is None else ratio / math.sqrt(head_dim)
    factors = () if effective is None or ratio == math.sqrt(head_dim) else (Factor(effective, "op", "sdpa scale"),)
    stages = (
        Stage("q", "projection", "Linear 256 -> 256"),
        Stage("k", "projection", "Linear 256 -> 256"),
        Stage("q", "rope"),
        Stage("k", "rope"),
        Stage("logits", "product"),
        Stage("logits", "scale", f"{effective}"),
        Stage("logits", "mask", "causal"),
    )
    shown = "" if effective is None or ratio == math.sqrt(head_dim) else f"{effective:.4g} * "
    call = AttentionCall(
        site=site,
        index=0,
        module_class="Attention",
        kind="sdpa",
        op="aten._scaled_dot_product_flash_attention_for_cpu",
        score="dot",
        batch=2,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        padded_head_dim=head_dim,
        value_dim=head_dim,
        model_dim=heads * head_dim,
        query_len=length,
        key_len=length,
        self_attention=True,
        dtype="float32",
        logits_dtype="float32",
        device="cpu",
        stages=stages,
        formula=formula or f"softmax({shown}rope(q).rope(k) + causal)",
        scale=EffectiveScale(
            effective, ratio, effective, effective, None if ratio is None else 0.999999, factors, agree=True
        ),
        rope=True,
        mask=Mask("causal", "implicit", 0, 0, 0.0),
        future_weight=0.0,
        output_rms=0.31,
        stats=stats,
        stats_reason=None if stats is not None else stats_reason,
    )
    call = dataclasses.replace(call, **fields)  # type: ignore[arg-type]
    expected = None if verdict == "unmeasured" else 1 / math.sqrt(head_dim)
    return JudgedCall(call, verdict, mistake, declared_by, expected, reason)


def healthy(layers: int = 32, heads: int = 32) -> CheckReport:
    """A decoder of equal layers with nothing to find."""
    calls = tuple(
        judged(f"model.layers.{i}.self_attn", heads=heads, stats=head_stats(heads, 0.5 + i / layers, seed=i))
        for i in range(layers)
    )
    return _report("org/healthy-7b", "LlamaForCausalLM", 6_738_415_616, calls)


def static() -> CheckReport:
    """A configuration without weights: scales only, one kind of them declared."""
    plain_layers = [judged(f"model.layers.{i}.self_attn") for i in range(48) if i % 6 != 5]
    declared = [
        judged(
            f"model.layers.{i}.self_attn",
            ratio=0.5,
            verdict="declared",
            declared_by="config.query_pre_attn_scalar = 256",
            formula="softmax(softcap(0.0625 * rope(q).rope(k), 50) + causal)",
        )
        for i in range(5, 48, 6)
    ]
    calls = tuple(sorted((*plain_layers, *declared), key=lambda item: int(item.call.site.split(".")[2])))
    return dataclasses.replace(_report("org/config-only", "Gemma3ForCausalLM", 27_432_406_640, calls), mode="static")


def sick() -> CheckReport:
    """Everything at once: two kinds of calls, wrong scales, NaN, an infinity, the unmeasured, each severity."""
    right = [judged(f"decoder.h.{i}.attn", stats=head_stats(8, 1 + i / 4, seed=i), heads=8) for i in range(3)]
    wrong = [
        judged(
            f"decoder.h.{i}.attn",
            ratio=8.0,
            heads=8,
            verdict="unexplained",
            mistake="missing",
            kind="eager",
            reason="no factor between the projections and the softmax",
            stats=_infinite(head_stats(8, 8.0, seed=i, nan_head=5 if i == 4 else None)),
        )
        for i in range(3, 7)
    ]
    others = [
        judged(
            "encoder.cross_attention_with_a_rather_long_name.attention.inner",
            ratio=None,
            verdict="unmeasured",
            reason="the readings disagree: symbolic 0.125, numeric 0.0884",
            formula="softmax(unknown(aten.fft_rfft)(q.k))",
            unknown=("aten.fft_rfft",),
            stats=head_stats(4, 1.0, seed=77),
        ),
        judged("", ratio=0.125, verdict="unexplained", mistake="twice", stats=head_stats(2, 0.1, seed=5), heads=2),
        judged(
            "vision.blocks.0.attn",
            head_dim=80,
            verdict="declared",
            ratio=1.1,
            declared_by="family vit: scale (d/2)^-1/2",
            stats=head_stats(12, 1.2, seed=9),
            heads=12,
            index=1,
        ),
    ]
    findings = (
        *(
            Finding("max_logit", "critical", f"decoder.h.{i}.attn", math.inf if i == 3 else 12345.0 + i, 1e4,
                    f"head {i} reaches a max logit of {12345 + i}: all runs of the source diverged here",
                    "Restore the scale 1/sqrt(64) or normalise q and k.", "Wortsman et al. 2023, figure 1")
            for i in range(3, 7)
        ),
        *(
            Finding("scale_ledger", "fail", f"decoder.h.{i}.attn", 8.0, 1.0,
                    "the scale 1/sqrt(d_k) is missing: the ratio is sqrt(64) = 8",
                    "Multiply the product by 0.125, or use scaled_dot_product_attention.", "Vaswani et al. 2017, 3.2.1")
            for i in range(3, 7)
        ),
        Finding("scale_ledger", "fail", "", 0.125, 1.0, "the scale is applied twice", "Remove one of the two factors.",
                "Vaswani et al. 2017, 3.2.1"),
        Finding("nan_rows", "fail", "decoder.h.4.attn", NAN, None, "512 rows of head 5 hold NaN logits",
                "Find the first module whose output is not finite.", "sqrtdk: a softmax over NaN is NaN"),
        Finding("saturation", "warn", "decoder.h.5.attn", 0.91, 0.5, "91% of the rows put over 0.99 on one key",
                "Check the scale first, then the learning rate.", "sqrtdk finite-n table"),
        Finding("eager_against_sdpa", "note", "decoder.h.0.attn", "3e-4", "1e-4",
                "eager and sdpa differ by 3e-4 at a logit spread of 4", "Compare softcap and scale of the two paths.",
                "sqrtdk: tolerance of float32"),
    )  # fmt: skip
    calls = _with_health((*right, *wrong, *others), findings)
    return dataclasses.replace(
        _report("org/sick-125m", "GPT2LMHeadModel", 124_439_808, calls),
        findings=findings,
        not_attention=(
            NotAttention("decoder.h.0.moe.router", 0, (2, 256, 8), "a softmax whose weights reach no value product"),
            NotAttention("decoder.h.1.moe.router", 0, (2, 256, 8), "a softmax whose weights reach no value product"),
            NotAttention("pool", 0, (2, 256), "logits are no product of q and k"),
        ),
        not_measured=(
            NotMeasured("decoder.h.7.attn", "compiled: runs outside the trace; run it eagerly"),
            NotMeasured("audio", "no input of this kind was given"),
        ),
    )


def leaking() -> CheckReport:
    """The right scale everywhere, and one layer whose mask shows every row the key after its own."""
    calls = tuple(judged(f"h.{i}.attn", stats=head_stats(4, 1.0, seed=i)) for i in range(3))
    leak = Finding(
        "mask_audit", "critical", "h.1.attn", -1.0, 0.0, "the causal mask is off by one", "use tril", "paper"
    )
    report = _report("org/leaking", "GPT", 1000, _with_health(calls, (leak,)))
    return dataclasses.replace(report, findings=(leak,))


def lawless() -> CheckReport:
    """The right scale everywhere; later tokens move earlier outputs, and one of two masks never arrives."""
    calls = tuple(judged(f"h.{i}.attn", stats=head_stats(4, 1.0, seed=i)) for i in range(3))
    leak = Message("laws.causal.earlier_moves", count=8, cut=64, why=Message("laws.causal.declared"))
    idle = Message("laws.padding.no_effect", mask="encoder_attention_mask")
    fix = Message("laws.causal.fix")
    findings = (
        Finding("law_causal", "critical", "h.1.attn", 8.0, 0.0, leak, fix, "s"),
        Finding("law_padding", "warn", "", None, None, idle, "pass it down, or do not take it", "s"),
    )
    moved = tuple(56 <= position < 128 for position in range(128))
    laws = (
        LawAnswer("finite", "", KEPT),
        LawAnswer("samples", "", NOT_ASKED, Message("laws.samples.no_output_per_sample")),
        LawAnswer("causal", "input_ids", BROKEN, leak, "h.1.attn", moved, findings[0]),
        LawAnswer("padding", "attention_mask", KEPT),
        LawAnswer("padding", "encoder_attention_mask", BROKEN, idle, finding=findings[1]),
        LawAnswer("documents", "", NOT_ASKED, Message("laws.documents.one_document")),
    )
    report = _report("org/lawless", "GPT", 1000, _with_health(calls, findings))
    return dataclasses.replace(report, findings=findings, laws=laws)


def unjudged() -> CheckReport:
    """Nothing wrong was found, and one of two layers could not be judged; a third is idle."""
    why = "the two readings disagree: 0.125 by the factors, 0.06 by the logits"
    lost = judged("h.1.attn", verdict="unmeasured", reason=why, stats=head_stats(4, 1.0, seed=1))
    idle = NotMeasured("vision.attn", "did not run with these inputs")
    findings = (
        Finding("unmeasured", "warn", "h.1.attn", None, None, f"the scale could not be judged: {why}", "judge it", "s"),
        Finding("unmeasured", "note", idle.site, None, None, idle.reason, "give inputs that run it", "s"),
    )
    calls = _with_health((judged("h.0.attn", stats=head_stats(4, 1.0)), lost), findings)
    report = _report("org/unjudged", "GPT", 1000, calls)
    return dataclasses.replace(report, findings=findings, not_measured=(idle,))


def hostile() -> CheckReport:
    """A model whose every text attacks the page that shows it."""
    call = judged(
        f"layers.0.{EVIL}",
        formula=f"softmax({EVIL})",
        verdict="declared",
        declared_by=f"config.{EVIL} = 1",
        reason=EVIL,
        module_class=EVIL,
        op=EVIL,
        bias=EVIL,
        norm=EVIL,
        unknown=(EVIL,),
        stages=(Stage("q", EVIL, EVIL, EVIL),),
        product_at=EVIL,
        softmax_at=f"{EVIL}:1",
        stats=head_stats(2, 1.0),
        heads=2,
    )
    factors = (Factor(0.125, "q", f"parameter {EVIL}", learned=True, at=EVIL),)
    call = dataclasses.replace(
        call,
        call=dataclasses.replace(call.call, scale=dataclasses.replace(call.call.scale, factors=factors, reason=EVIL)),
    )
    return CheckReport(
        model=ModelInfo(EVIL, EVIL, 7),
        mode="dynamic",
        calls=(call,),
        not_attention=(NotAttention(EVIL, 0, (1,), EVIL, EVIL, EVIL),),
        not_measured=(NotMeasured(EVIL, EVIL, EVIL, EVIL),),
        findings=(Finding(EVIL, "warn", EVIL, EVIL, EVIL, EVIL, EVIL, EVIL, EVIL),),
        laws=(
            LawAnswer("finite", EVIL, BROKEN, EVIL, EVIL, (True, False, True)),
            LawAnswer("padding", EVIL, NOT_ASKED, EVIL),
        ),
        command=f"sqrtdk check {EVIL}",
        environment={EVIL: EVIL},
    )


def _infinite(stats: HeadStats) -> HeadStats:
    return dataclasses.replace(stats, max_logit=(math.inf, *(value * 100 for value in stats.max_logit[1:])))


def _report(name: str, cls: str, parameters: int, calls: tuple[JudgedCall, ...]) -> CheckReport:
    command = f"sqrtdk check {name}"
    model = ModelInfo(name, cls, parameters)
    calls = _with_health(calls) if all(call.health == UNMEASURED for call in calls) else calls
    return CheckReport(model, "dynamic", calls, (), (), (), seed=0, command=command, environment=ENVIRONMENT)


def _with_health(calls: tuple[JudgedCall, ...], findings: tuple[Finding, ...] = ()) -> tuple[JudgedCall, ...]:
    return tuple(dataclasses.replace(entry, health=health(entry, findings)) for entry in calls)

"""`assert_attention` and `assert_same_attention`: audit and comparison as assertions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from sqrtdk._check import check
from sqrtdk.audit.records import CheckReport
from sqrtdk.compare.causes import CAUSES
from sqrtdk.compare.diff import diff
from sqrtdk.compare.records import DiffReport, OutputDiff, PairDiff
from sqrtdk.compare.sides import ModelSource
from sqrtdk.testing.standing import (
    alone_lines,
    as_allowed,
    check_allowed,
    check_fail_on,
    count_text,
    failing,
    findings_lines,
    is_allowed,
    outputs_lines,
    pair_site,
    pairs_lines,
    printable,
    site_matches,
)

UNPAIRED = "unpaired"  # name in `allow` for a call without a partner
NOT_COMPARED = "unmeasured"  # name in `allow` for a pair that could not be judged


def assert_attention(
    model: nn.Module | str,
    inputs: Any = None,
    fail_on: str = "fail",
    allow: str | Sequence[str] = (),
    *,
    seed: int = 0,
) -> CheckReport:
    """Audit every attention of a model as `sqrtdk check` does, and fail on its findings.

    An attention that could not be judged fails too unless `fail_on` is "never", because a test that judged nothing must
    not pass. To accept it, allow "unmeasured" or the site.

    Args:
        model: A module, which runs in evaluation mode and is left as it was; or a name that `sqrtdk check` takes.
        inputs: For forward: one tensor, a tuple or a dict. None makes up inputs from the model's config.
        fail_on: Least severity that fails: "note", "warn", "fail" (default), "critical"; "unmeasured" is "fail";
            "never" fails on nothing.
        allow: Findings to accept: sites ("layers.0.attn"; patterns, "layers.*.attn"), mistakes ("missing", "twice"),
            "unexplained", rules ("max_logit", "mask_audit"), "unmeasured".
        seed: Seed of the run.

    Returns:
        The report of the audit.

    Raises:
        AssertionError: A finding at `fail_on` or above, or an attention that was not judged, is not allowed.
        InvalidValueError: An option is unknown, or a name in `allow` matches nothing that could be allowed.
        ModelError: The model can't be run, or no attention runs in it.

    Example:
        >>> import torch
        >>> layer = torch.nn.MultiheadAttention(32, 4, batch_first=True)
        >>> x = torch.randn(1, 6, 32)
        >>> assert_attention(layer, (x, x, x)).calls[0].verdict
        'exact'
        >>> assert_attention("demo:unscaled", fail_on="never", allow="missing").calls[0].mistake
        'missing'
    """
    allowed = as_allowed(allow)
    check_fail_on(fail_on)
    # assert_laws asks the laws
    report = check(model, inputs, laws="none", fail_on=fail_on, seed=seed)
    check_allowed(allowed, {judged.call.site for judged in report.calls} | {found.site for found in report.findings})
    bad = failing(report.findings, report.calls, fail_on, allowed)
    if fail_on != "never":
        lost = [found for found in report.unjudged if not is_allowed(found, report.calls, allowed)]
        bad = (*bad, *(found for found in lost if found not in bad))
    if bad:
        raise AssertionError("\n".join([_headline(report, bad, fail_on), *findings_lines(bad, report.calls)]))
    return report


def _headline(report: CheckReport, bad: Sequence[Any], fail_on: str) -> str:
    unjudged = sum(finding in report.unjudged for finding in bad)
    parts = [count_text(len(bad) - unjudged, "finding")] if len(bad) > unjudged else []
    parts += [f"{count_text(unjudged, 'attention')} not judged"] if unjudged else []
    ran = f"{count_text(len(report.calls), 'attention')} ran"
    return f"attention of {printable(report.model.cls)}: {', '.join(parts)}; {ran} (fail_on: {fail_on})"


def assert_same_attention(
    a: ModelSource,
    b: ModelSource,
    inputs: Any = None,
    *,
    inputs_b: Any = None,
    mapping: Mapping[str, str] | str | Path | None = None,
    allow: str | Sequence[str] = (),
    attention_only: bool = False,
    seed: int = 0,
) -> DiffReport:
    """Compare two implementations of one model as `sqrtdk diff` does, and fail if they differ.

    They differ if an attention does, or if all attentions agree but the models' outputs do not. A pair that could not
    be compared fails too, and so does an output that is NaN on both sides. Sides without comparable outputs, such as
    trace files, are judged by their attentions.

    Args:
        a: The reference: a module, or anything that `sqrtdk diff` accepts.
        b: The implementation under test.
        inputs: For forward: one tensor, a tuple or a dict. None makes up inputs for `a`.
        inputs_b: Inputs for `b`, if it takes others.
        mapping: Site of `a` -> site of `b`, if names and order do not pair them.
        allow: Differences to accept: sites of `a` (patterns too), causes ("scale", "softcap"), "unpaired",
            "unmeasured". Outputs may then differ as a result.
        attention_only: Whether to judge the attentions alone and ignore the models' outputs.
        seed: Seed of the runs.

    Returns:
        The report of the comparison.

    Raises:
        AssertionError: The attentions or the outputs differ beyond rounding, or could not be compared.
        InvalidValueError: A name in `allow` matches nothing, or the inputs do not fit the models.
        ModelError: A side can't be run, or no attention runs in it.

    Example:
        >>> assert_same_attention("demo", "demo").same
        True
    """
    allowed = as_allowed(allow)
    report = diff(a, b, inputs, inputs_b=inputs_b, mapping=mapping, seed=seed)
    alone = (*report.unpaired_a, *report.unpaired_b)
    sites = {pair.site_a for pair in report.pairs} | {pair_site(pair) for pair in report.pairs}
    check_allowed(allowed, sites | {call.site for call in alone}, {*CAUSES, "input", UNPAIRED, NOT_COMPARED})
    bad = [pair for pair in report.pairs if pair.same is not True and not _may_stand(pair, allowed)]
    # a difference that follows from an allowed one is allowed too
    origins = {pair_site(pair) for pair in report.pairs if pair not in bad}
    bad = [pair for pair in bad if pair.follows_from is None or pair.follows_from not in origins]
    lonely = [] if UNPAIRED in allowed else alone_lines(report, allowed)
    outputs = [] if attention_only else _outputs(report, bad, lonely, allowed)
    if bad or lonely or outputs:
        headline = _difference(report, bad, len(lonely), len(outputs))
        raise AssertionError("\n".join([headline, *_pair_lines(bad), *lonely, *outputs_lines(report, outputs)]))
    return report


def _outputs(
    report: DiffReport, bad: Sequence[PairDiff], lonely: Sequence[str], allowed: Sequence[str]
) -> list[OutputDiff]:
    """Return the outputs that fail. An output that differs because of an allowed difference does not."""
    standing = [pair for pair in report.pairs if pair.same is not True and pair not in bad]
    # an allowed change of the input, or an allowed call without a partner, may change every output
    entered = any(cause.name == "input" for pair in standing for cause in pair.causes)
    alone = (report.unpaired_a or report.unpaired_b) and not lonely
    if entered or alone or (standing and report.outputs_follow):
        return []
    return [one for one in report.outputs if one.same is False or (one.same is None and NOT_COMPARED not in allowed)]


def _may_stand(pair: PairDiff, allowed: Sequence[str]) -> bool:
    if any(site_matches(site, name) for site in (pair.site_a, pair_site(pair)) for name in allowed):
        return True
    if pair.same is None:
        return NOT_COMPARED in allowed
    return bool(pair.causes) and all(cause.name in allowed for cause in pair.causes)


def _difference(report: DiffReport, bad: Sequence[PairDiff], alone: int, outputs: int) -> str:
    lost = sum(pair.same is None for pair in bad)
    parts = [f"{count_text(len(bad) - lost, 'attention')} of {len(report.pairs)} differ"] if len(bad) > lost else []
    parts += [f"{count_text(lost, 'attention')} not compared"] if lost else []
    parts += [f"{count_text(alone, 'attention')} without a partner"] if alone else []
    parts += [f"{count_text(outputs, 'output')} of {len(report.outputs)} not the same"] if outputs else []
    return f"attention of {printable(report.a.name)} (A) and {printable(report.b.name)} (B): {', '.join(parts)}"


def _pair_lines(bad: Sequence[PairDiff]) -> list[str]:
    """Return lines on pairs with a difference of their own; pairs that follow from them are counted."""
    own = [pair for pair in bad if pair.follows_from is None]
    following: dict[str, int] = {}
    for pair in bad:
        if pair.follows_from is not None:
            following[pair.follows_from] = following.get(pair.follows_from, 0) + 1
    return pairs_lines(own) + [f"{number} more follow from {printable(site)}" for site, number in following.items()]

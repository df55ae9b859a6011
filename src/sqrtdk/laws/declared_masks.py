"""The part of law `configured` about masks: window and direction of each layer, as module and config declare them.

Nothing is run: the masks are those of the audited run or, without values (meta), those known from shapes and arguments.
If the rules `sliding_window` or `mask_audit` have a finding, the answer repeats its words and adds no finding. The law
adds two cases that no rule covers: a window in a layer that is declared to have none, and a causal mask although the
config says that attention is bidirectional.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from sqrtdk.audit.configs import field, module_at
from sqrtdk.audit.declared import config_at
from sqrtdk.audit.records import BROKEN, LawAnswer
from sqrtdk.audit.rules.windows import declared_window
from sqrtdk.audit.sight import leak, lookahead, may_see_ahead, says_causal
from sqrtdk.laws.answers import law_broken, law_holds
from sqrtdk.laws.subject import Subject
from sqrtdk.messages import Message
from sqrtdk.tracing.records import AttentionCall

LAW = "configured"
WINDOW, DIRECTION = "laws.configured.about.window", "laws.configured.about.direction"
REPEATED = ("sliding_window", "mask_audit")  # rules that find the same faults: their words are repeated
CAUSAL_KINDS = ("causal", "causal_lower_right")


def of_masks(subject: Subject, *, static: bool = False) -> Iterator[LawAnswer]:
    """Yield for each attention whether its mask shows the sliding window and the direction that the config declares.

    Args:
        subject: The model with the attentions of its ordinary run, whose masks are compared; nothing is run.
        static: Whether that run was on the meta device, without values.
    """
    for judged in subject.calls:
        call = judged.call
        module, config = module_at(subject.module, call.site), config_at(subject.module, call.site)
        yield from _window(subject, call, module, config)
        yield from _direction(subject, call, module, config, static)


def _window(subject: Subject, call: AttentionCall, module: nn.Module | None, config: object) -> Iterator[LawAnswer]:
    here = (REPEATED[0], call.site, call.index)
    finding = next((one for one in subject.findings if (one.rule, one.site, one.call) == here), None)
    if finding is not None:
        yield LawAnswer(LAW, Message(WINDOW), BROKEN, finding.message, call.site)
        return
    window, mask = declared_window(call.site, module, config), call.mask
    if window is None or mask is None or mask.greatest is None or mask.least is None:
        return
    # Rows that are not longer than the window do not show it.
    if window.keys and call.key_len > window.keys and mask.greatest + 1 in window.sides(mask.least < 0):
        yield law_holds(LAW, Message(WINDOW))
    elif not window.keys and mask.kind == "window" and mask.band and call.self_attention is not False:
        message = Message("laws.configured.window_of_others", seen=mask.greatest + 1, by=window.by)
        fix, source = Message("laws.configured.fix_window"), Message("laws.configured.source_masks")
        yield law_broken(LAW, Message(WINDOW), "fail", call.site, message, fix, source)


def _direction(
    subject: Subject, call: AttentionCall, module: nn.Module | None, config: object, static: bool
) -> Iterator[LawAnswer]:
    owners, mask = (module, config), call.mask
    if says_causal(call, *owners):
        if not static or may_see_ahead(owners, field(subject.module, "config"), mask) is not None:
            return  # with values, the law `causal` tests the outputs instead
        fault = next(iter(leak(call, lookahead(owners), static)), None)
        if fault is not None:
            yield LawAnswer(LAW, Message(DIRECTION), BROKEN, fault[3], call.site)
        elif mask is not None and (mask.kind in CAUSAL_KINDS or mask.least == 0):
            yield law_holds(LAW, Message(DIRECTION))
        return
    words = _bidirectional(config)
    if words is None or call.self_attention is False or call.query_len < 2:
        return
    if mask is not None and mask.kind in CAUSAL_KINDS:
        message = Message("laws.configured.runs_causally", why=words)
        fix, source = Message("laws.configured.fix_runs_causally"), Message("laws.configured.source_masks")
        yield law_broken(LAW, Message(DIRECTION), "fail", call.site, message, fix, source)
    elif mask is None or (mask.least is not None and mask.least < 0):
        yield law_holds(LAW, Message(DIRECTION))


def _bidirectional(config: object) -> str | None:
    """Return the config's words that rows see later keys, or None."""
    for name in ("is_causal", "causal"):
        if field(config, name) is False:
            return f"config.{name} = False"
    value = field(config, "use_bidirectional_attention")
    return f"config.use_bidirectional_attention = {value}" if value in (True, "all") else None

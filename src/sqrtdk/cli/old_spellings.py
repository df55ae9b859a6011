"""What has another spelling now: a verb or an option that was removed says the command that does its work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

NEW_SPELLINGS: Mapping[str, str] = {  # words that were typed after `sqrtdk` -> the command now
    "baseline": "sqrtdk check MODEL --baseline FILE",
    "baseline check": "sqrtdk check MODEL --baseline FILE",
    "baseline write": "sqrtdk check MODEL --baseline FILE --update",
    "configs": "sqrtdk check --static FILE...",
    "check --like": "sqrtdk diff MODEL GRAPH",
    "check --run": "sqrtdk check GRAPH --input FILE.safetensors",
    "check --kv-dtype": "sqrtdk kv MODEL --cache-dtype FORMAT",
    "check --kv-scale": "sqrtdk kv MODEL --cache-dtype FORMAT --cache-scale GRAIN",
    "check --kv-rows": "sqrtdk kv MODEL --rows N",
    "diff --attn-a": "sqrtdk diff A B --a attn=VALUE",
    "diff --attn-b": "sqrtdk diff A B --b attn=VALUE",
    "diff --dtype-a": "sqrtdk diff A B --a dtype=VALUE",
    "diff --dtype-b": "sqrtdk diff A B --b dtype=VALUE",
    "diff --device-a": "sqrtdk diff A B --a device=VALUE",
    "diff --device-b": "sqrtdk diff A B --b device=VALUE",
    "diff --revision-a": "sqrtdk diff A B --a revision=VALUE",
    "diff --revision-b": "sqrtdk diff A B --b revision=VALUE",
}


def new_spelling(path: str, option: str | None, words: Sequence[str]) -> str | None:
    """Return the command that replaces what was refused, or None if nothing of that name was there.

    Args:
        path: of the verb or group that refused it: "sqrtdk diff".
        option: that it does not know; None if it does not know a verb.
        words: that follow the path, the first of them the verb that it does not know.

    Example:
        >>> new_spelling("sqrtdk", None, ["baseline", "write", "demo"])
        'sqrtdk check MODEL --baseline FILE --update'
        >>> new_spelling("sqrtdk diff", "--dtype-b", [])
        'sqrtdk diff A B --b dtype=VALUE'
    """
    above = path.split()[1:]
    typed = [[*above, option]] if option is not None else [[*above, *words[:2]], [*above, *words[:1]]]
    return next((NEW_SPELLINGS[key] for key in map(" ".join, typed) if key in NEW_SPELLINGS), None)

"""Verbs and options that people guess, and those of earlier versions, each with the command that does what was meant.

A guess is refused as any unknown word is. Its hint says who does it: `sqrtdk laws demo` leads to
`sqrtdk check MODEL --laws all`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from sqrtdk.messages import Message

NEW_SPELLINGS: Mapping[str, str] = {  # removed verbs and options, as they were typed -> the command now
    "baseline": "sqrtdk check MODEL --baseline FILE",
    "baseline check": "sqrtdk check MODEL --baseline FILE",
    "baseline write": "sqrtdk check MODEL --baseline FILE --update",
    "configs": "sqrtdk check --static FILE...",
    "watch report": "sqrtdk watch show RUN --html FILE",
    "check --like": "sqrtdk diff MODEL GRAPH",
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
# what people type as a verb -> the id of its sentence in the catalogue, without "errors.guess."
GUESSED_VERBS: Mapping[str, str] = {
    **dict.fromkeys(("laws", "law", "ask", "explain laws", "list laws", "padding", "causal"), "laws"),
    **dict.fromkeys(("list", "ls", "claims", "claim", "experiment", "experiments"), "claims"),
    **dict.fromkeys(("compare", "cmp", "parity", "port"), "compare"),
    **dict.fromkeys(
        ("audit", "lint", "analyze", "analyse", "inspect", "scan", "test", "verify", "validate", "run"), "audit"
    ),
    **dict.fromkeys(("explain", "why", "docs", "doc"), "explain"),
    **dict.fromkeys(("monitor", "train"), "watch"),
    **dict.fromkeys(("measure", "stats", "entropy", "plot"), "measure"),
    **dict.fromkeys(("report", "html"), "report"),
    **dict.fromkeys(("serve", "explorer", "explore", "ui"), "explorer"),
    **dict.fromkeys(("doctor", "info", "version", "versions"), "machine"),
    **dict.fromkeys(("presets", "list models", "models", "count"), "presets"),
    **dict.fromkeys(("quantize", "quantise", "cache", "kvcache"), "cache"),
    "trace": "trace",
    "bench": "bench",
}
_PAGES = ("--format", "--output-format", "--report", "--report-format")
_OF_ALL: Mapping[str, str] = {
    **dict.fromkeys(
        ("--json-out", "--json-file", "--json-output", "--out", "--out-file", "--output-file", "--save", "-o"), "json"
    ),
    **dict.fromkeys(("--cuda", "--gpu"), "device"),
    **dict.fromkeys(("--fp16", "--bf16", "--half", "--precision", "--torch-dtype"), "dtype"),
    **dict.fromkeys(("--length", "--max-length", "--max-seq-len", "--sequence-length"), "length"),
    **dict.fromkeys(("--attn-implementation", "--attn-impl", "--attention"), "attn"),
    **dict.fromkeys(("--prompt", "--prompts"), "prompt"),
    **dict.fromkeys(("--inputs", "--input-ids"), "input"),
    **dict.fromkeys(("--model", "--checkpoint", "-m"), "model"),
}
# the same for the options of a verb
GUESSED_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "check": {
        **_OF_ALL,
        **dict.fromkeys(_PAGES, "pages"),
        **dict.fromkeys(("--strict", "--werror", "--severity", "--level"), "strict"),
        **dict.fromkeys(("--gradient", "--gradients", "--backward"), "gradients"),
    },
    "kv": {**_OF_ALL, **dict.fromkeys(_PAGES, "pages")},
    "diff": {
        **_OF_ALL,
        **dict.fromkeys(_PAGES, "pages_of_two"),
        **dict.fromkeys(("--atol", "--rtol", "--tol", "--tolerance", "--threshold", "--eps"), "no_tolerance"),
        **dict.fromkeys(("--gradient", "--gradients", "--grad"), "gradients_of_two"),
        **dict.fromkeys(("--strict", "--werror"), "strict_of_two"),
    },
}


def instead(path: str, words: Sequence[str], refusal: str) -> Message | None:
    """Return what does what a refused word asked for, as a hint; None if nothing is known of it.

    Args:
        path: Of the verb or group that refused it: "sqrtdk diff".
        words: The option that it does not know; or what follows the path, of which it does not know the first.
        refusal: How typer refuses it.

    Example:
        >>> str(instead("sqrtdk", ["baseline", "write", "demo"], ""))
        'it is now: sqrtdk check MODEL --baseline FILE --update'
        >>> str(instead("sqrtdk", ["laws", "demo"], ""))
        'laws are asked by: sqrtdk check MODEL --laws all'
        >>> str(instead("sqrtdk diff", ["--dtype-b"], ""))
        'it is now: sqrtdk diff A B --b dtype=VALUE'
    """
    above, pair = path.split()[1:], " ".join(words[:2])
    for typed in (pair, *words[:1]):
        if command := NEW_SPELLINGS.get(" ".join([*above, typed])):
            return Message("errors.usage.now", command=command)
    if path == "sqrtdk app" and refusal.startswith("Got unexpected extra argument"):
        return Message("errors.guess.app_file")
    if not words:
        return None
    word, id = words[0], None
    if word.startswith("-"):
        id = GUESSED_OPTIONS.get(" ".join(above), {}).get(word)
    elif path == "sqrtdk":
        id = GUESSED_VERBS.get(pair) or GUESSED_VERBS.get(word) or ("audit" if _is_model(word) else None)
    elif path == "sqrtdk watch" and "Did you mean" not in refusal:
        id = "watch"
    return Message(f"errors.guess.{id}") if id else None


def _is_model(word: str) -> bool:
    """Return whether a word looks like a MODEL: `sqrtdk ./my-model`, `sqrtdk demo:unscaled`."""
    return "/" in word or ":" in word or word == "demo" or Path(word).exists()

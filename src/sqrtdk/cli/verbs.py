"""Registers verbs and groups with Typer, with their examples; what they do says the catalogue of help."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from sqrtdk.cli import options
from sqrtdk.cli.help import HelpfulCommand, HelpfulGroup

# Commands that run as they are -> id of a remark beside it.
EXAMPLES: dict[str, dict[str, str]] = {
    "sqrtdk": {
        "sqrtdk check demo:unscaled": "cli.examples.unscaled",
        "sqrtdk check --help": "cli.examples.help",
        "sqrtdk --install-completion": "cli.examples.completion",
    },
    "check": {
        "sqrtdk check demo": "",
        "sqrtdk check demo:unscaled": "cli.examples.missing",
        "sqrtdk check ./my-model --html report.html": "",
        "sqrtdk check --static models/*/config.json": "cli.examples.static",
        "sqrtdk check ./my-model --baseline attention.json": "cli.examples.baseline",
    },
    "diff": {
        "sqrtdk diff demo demo:unscaled": "",
        "sqrtdk diff ./original ./port --html diff.html": "",
        "sqrtdk diff org/model org/model --a attn=eager --b attn=sdpa": "",
    },
    "kv": {
        "sqrtdk kv demo": "cli.examples.formats",
        "sqrtdk kv ./my-model --cache-dtype int8 --cache-scale head": "",
    },
    "record": {
        "sqrtdk record demo --output trace.safetensors": "",
        "sqrtdk record ./my-model --calls '*layers.0.*' --output layer0.safetensors": "",
    },
    "params": {"sqrtdk params": "cli.examples.presets", "sqrtdk params gpt2-xl": ""},
    "build": {"sqrtdk build": "", "sqrtdk build --if-possible": "cli.examples.script"},
    "env": {"sqrtdk env": "", "sqrtdk env --json": ""},
    "app": {"sqrtdk app --open": "", "sqrtdk app --port 0": "cli.examples.port"},
    "lab": {"sqrtdk lab list": "", "sqrtdk lab show grad-norm": "", "sqrtdk lab run grad-norm --quick": ""},
    "lab list": {"sqrtdk lab list": ""},
    "lab show": {"sqrtdk lab show grad-norm": ""},
    "lab run": {"sqrtdk lab run grad-norm --quick": "", "sqrtdk lab run all --output my-lab": ""},
    "lab report": {"sqrtdk lab report my-lab": ""},
    "lab sweep": {"sqrtdk lab sweep --output my-sweep --d-k 16,64 --scale sqrt_dk,none": ""},
    "watch": {"sqrtdk watch show runs/a --follow": "cli.examples.training", "sqrtdk watch compare runs/a runs/b": ""},
    "watch show": {
        "sqrtdk watch show runs/a": "",
        "sqrtdk watch show runs/a --html a.html": "",
        "sqrtdk watch show runs/a --follow": "cli.examples.training",
        "sqrtdk watch show runs/a --serve 0": "cli.examples.serve",
    },
    "watch compare": {"sqrtdk watch compare runs/a runs/b --html both.html": ""},
    "watch checkpoints": {"sqrtdk watch checkpoints 'runs/a/checkpoint-*' --output records": ""},
}
_REMARK_AT = 35  # column
_CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"], "token_normalize_func": options.whole_word}


def group_of(name: str, **settings: Any) -> typer.Typer:
    """Return a group to which verbs can be registered, or the program.

    Args:
        name: key of `EXAMPLES`.
        settings: of `typer.Typer`, where they differ from a group's.
    """
    of_a_group: dict[str, Any] = {
        "short_help": f"cli.verbs.{name}.line",
        "help": f"cli.verbs.{name}.about",
        "callback": pass_language_on,
    }
    return typer.Typer(
        name=name,
        cls=HelpfulGroup,
        epilog=_examples(name),
        no_args_is_help=True,
        options_metavar="cli.words.options_metavar",
        subcommand_metavar="cli.words.command_metavar",
        rich_markup_mode=None,  # rich help would double the start-up time
        context_settings=_CONTEXT_SETTINGS,
        **(of_a_group | settings),
    )


def register(group: typer.Typer, function: Callable[..., None], name: str | None = None) -> None:
    """Register a function as a verb of the program (`group.info.name` is "sqrtdk") or of a group."""
    name = name or function.__name__
    path = name if group.info.name == "sqrtdk" else f"{group.info.name} {name}"
    texts = f"cli.verbs.{path.replace(' ', '_')}"
    command = group.command(
        name,
        cls=HelpfulCommand,
        short_help=f"{texts}.line",
        help=f"{texts}.about",
        epilog=_examples(path),
        options_metavar="cli.words.options_metavar",
    )
    command(options.expanded(function))


def pass_language_on(context: typer.Context, lang: options.Lang = "auto") -> None:
    """Make the `--lang` of a group or the program the default of its verbs."""
    group: Any = context.command
    context.default_map = {name: {"lang": lang} for name in group.commands}


def _examples(path: str) -> str:
    lines = (f"{line:<{_REMARK_AT}}# {remark}" if remark else line for line, remark in EXAMPLES[path].items())
    return "\n".join(lines)

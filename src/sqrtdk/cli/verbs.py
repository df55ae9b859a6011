"""Registers verbs and groups with Typer, with their examples; what they do says the catalogue of help."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import typer
from typer.main import get_command

from sqrtdk.cli import options
from sqrtdk.cli.help import HelpfulCommand, HelpfulGroup, text
from sqrtdk.errors import MissingExtraError
from sqrtdk.messages import Message

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
        "sqrtdk check http://127.0.0.1:8000/v1": "",
    },
    "diff": {
        "sqrtdk diff demo demo:unscaled": "",
        "sqrtdk diff ./original ./port --html diff.html": "",
        "sqrtdk diff org/model org/model --a attn=eager --b attn=sdpa": "",
        "sqrtdk diff ./my-model http://127.0.0.1:8000/v1": "",
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
ADDED = {"app": "app", "lab": "lab"}  # verb of another distribution -> extra that installs it
_REMARK_AT = 35  # column
_CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"], "token_normalize_func": options.whole_word}


class VerbGroup(HelpfulGroup):
    """The program: its own verbs, and those that other distributions add.

    Such a distribution has an entry point of the group `sqrtdk.verbs` for each verb, which names a `typer.Typer` with a
    command of this name. It is imported when its verb is typed; the list of verbs shows `ADDED`, without a look at what
    is installed, which would take a third of the time of `--help`.
    """

    def get_command(self, ctx: Any, name: str) -> Any:
        """Return the verb of a name; None if neither the program nor an installed distribution has it.

        click calls it. Verbs of other distributions are their entry points of the group "sqrtdk.verbs".
        """
        own = super().get_command(ctx, name)
        return _added(name) if own is None else own

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all verbs, those of other distributions last."""
        return [*super().list_commands(ctx), *ADDED]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the verb that was typed.

        Raises:
            MissingExtraError: Its distribution is not installed; the hint says how to install it.
        """
        try:
            return super().resolve_command(ctx, args)
        except Exception as error:
            if args[0] not in ADDED or not hasattr(error, "format_message"):  # an error of its own modules is told
                raise
            raise MissingExtraError(
                Message("errors.extras.verb", verb=args[0]), hint=Message("errors.hint.install", extra=ADDED[args[0]])
            ) from error

    def lines(self) -> list[tuple[str, str]]:
        """Return the name of each verb, with a line that says what it does."""
        return [*super().lines(), *((name, text(f"cli.verbs.{name}.line")) for name in ADDED)]


def _added(name: str) -> Any:
    """Return the verb of an installed distribution, or None."""
    from importlib.metadata import entry_points  # a third of the time of `--help`

    found = [*entry_points(group="sqrtdk.verbs", name=name)]
    added: Any = get_command(found[0].load()) if found else None
    return added and added.commands[name]


def group_of(name: str, examples: Mapping[str, Mapping[str, str]] = EXAMPLES, **settings: Any) -> typer.Typer:
    """Return a group to which verbs can be registered, or the program.

    Args:
        name: key of `examples`.
        examples: commands that run as they are, and the id of a remark beside each.
        settings: of `typer.Typer`, where they differ from a group's.
    """
    of_a_group: dict[str, Any] = {
        "short_help": f"cli.verbs.{name}.line",
        "help": f"cli.verbs.{name}.about",
        "callback": pass_language_on,
    }
    return typer.Typer(
        name=name,
        cls=VerbGroup if name == "sqrtdk" else HelpfulGroup,
        epilog=_listed(examples[name]),
        no_args_is_help=True,
        options_metavar="cli.words.options_metavar",
        subcommand_metavar="cli.words.command_metavar",
        rich_markup_mode=None,  # rich help would double the start-up time
        context_settings=_CONTEXT_SETTINGS,
        **(of_a_group | settings),
    )


def register_verb(
    group: typer.Typer, function: Callable[..., None], name: str | None = None,
    examples: Mapping[str, Mapping[str, str]] = EXAMPLES,
) -> None:  # fmt: skip
    """Register a function as a verb.

    Args:
        group: The program (`group.info.name` is "sqrtdk") or a group of verbs.
        function: The function, whose parameters are the options.
        name: Name of the verb; None: that of the function.
        examples: Examples of the help, by verb.
    """
    name = name or function.__name__
    path = name if group.info.name == "sqrtdk" else f"{group.info.name} {name}"
    texts = f"cli.verbs.{path.replace(' ', '_')}"
    command = group.command(
        name,
        cls=HelpfulCommand,
        short_help=f"{texts}.line",
        help=f"{texts}.about",
        epilog=_listed(examples[path]),
        options_metavar="cli.words.options_metavar",
    )
    command(options.expanded(function))


def pass_language_on(context: typer.Context, lang: options.Lang = "auto") -> None:
    """Make the `--lang` of the program, or of a group, the default of its verbs."""
    group: Any = context.command
    context.default_map = {name: {"lang": lang} for name in group.list_commands(context)}


def _listed(examples: Mapping[str, str]) -> str:
    lines = (f"{line:<{_REMARK_AT}}# {remark}" if remark else line for line, remark in examples.items())
    return "\n".join(lines)

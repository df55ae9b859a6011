"""What `--help` shows of each verb beside its docstring and options: a line in the list, and examples."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand

_TOLD_DEFAULT = re.compile(r"\bdefault: \((.+)\)(?=[;\]])")  # typer puts brackets around a default in words


class Verb(NamedTuple):
    """The line of a verb or group in the list of verbs, and example commands that run as they are."""

    line: str
    examples: tuple[str, ...]


VERBS: dict[str, Verb] = {
    "check": Verb(
        "Audit every attention of a model.",
        (
            "sqrtdk check demo:unscaled         # a model whose 1/sqrt(d_k) is missing",
            "sqrtdk check ./my-model --html report.html",
            "sqrtdk check ./my-model --static   # formulas alone, without weights",
        ),
    ),
    "configs": Verb("Check config.json files without weights.", ("sqrtdk configs models/*/config.json",)),
    "diff": Verb(
        "Say where two implementations of a model differ, and why.",
        ("sqrtdk diff demo demo:unscaled", "sqrtdk diff ./original ./port --html diff.html"),
    ),
    "record": Verb(
        "Write what every attention of a run computed with to a file.",
        (
            "sqrtdk record demo --output trace.safetensors",
            "sqrtdk record ./my-model --calls '*layers.0.*' --output layer0.safetensors",
        ),
    ),
    "params": Verb(
        "Count the parameters of attention.",
        ("sqrtdk params                      # all presets", "sqrtdk params gpt2-xl"),
    ),
    "build": Verb(
        "Compile the attention kernel for this CPU.",
        ("sqrtdk build", "sqrtdk build --if-possible         # in a script that goes on without"),
    ),
    "env": Verb("Show versions, machine and kernels.", ("sqrtdk env", "sqrtdk env --json")),
    "app": Verb(
        "Serve the explorer page on this machine.",
        ("sqrtdk app --open", "sqrtdk app --port 0                # any free port"),
    ),
    "baseline write": Verb(
        "Write what a model's attentions do now to a file.",
        ("sqrtdk baseline write demo", "sqrtdk baseline write ./my-model attention.json --force"),
    ),
    "baseline check": Verb(
        "Fail on what changed since that file was written.",
        ("sqrtdk baseline check demo", "sqrtdk baseline check ./my-model attention.json --markdown -"),
    ),
    "lab list": Verb("List all claims.", ("sqrtdk lab list",)),
    "lab show": Verb("Show one claim, and how it is measured.", ("sqrtdk lab show grad-norm",)),
    "lab run": Verb(
        "Measure claims and judge them.",
        ("sqrtdk lab run grad-norm --quick", "sqrtdk lab run all --output my-lab"),
    ),
    "lab report": Verb("Make one HTML page of what was measured.", ("sqrtdk lab report my-lab",)),
    "lab sweep": Verb(
        "Measure what scales do to random rows, over a grid.",
        ("sqrtdk lab sweep --output my-sweep --d-k 16,64 --scale sqrt_dk,none",),
    ),
    "watch show": Verb(
        "Draw a run in the terminal.",
        ("sqrtdk watch show runs/a", "sqrtdk watch show runs/a --follow  # while it trains"),
    ),
    "watch report": Verb("Make one HTML page of a run.", ("sqrtdk watch report runs/a --output a.html",)),
    "watch compare": Verb("Compare two runs.", ("sqrtdk watch compare runs/a runs/b --html both.html",)),
    "watch checkpoints": Verb(
        "Make the records of a run from its checkpoints.",
        ("sqrtdk watch checkpoints 'runs/a/checkpoint-*' --output records",),
    ),
}


GROUPS: dict[str, Verb] = {
    "baseline": Verb(
        "Keep what a model does in a file, and fail on what changed.",
        ("sqrtdk baseline write demo", "sqrtdk baseline check demo"),
    ),
    "lab": Verb(
        "Measure popular claims about sqrt(d_k), and judge them.",
        ("sqrtdk lab list", "sqrtdk lab show grad-norm", "sqrtdk lab run grad-norm --quick"),
    ),
    "watch": Verb(
        "Read what sqrtdk.watch recorded of training runs.",
        ("sqrtdk watch show runs/a --follow  # while it trains", "sqrtdk watch compare runs/a runs/b"),
    ),
}

INSTEAD: dict[tuple[str, str], str] = {  # of removed features: (command, how typer refuses it) -> what to use now
    ("sqrtdk", "No such command 'bench'"): (
        "the kernels are timed in a checkout of sqrtdk: python benchmarks/kernels.py, or make bench"
    ),
    ("sqrtdk app", "Got unexpected extra argument"): (
        "the explorer opens no file; the page of a check is written by sqrtdk check MODEL --html FILE, "
        "of a comparison by sqrtdk diff A B --html FILE, of a run by sqrtdk watch report RUN, "
        "of claims by sqrtdk lab report DIR"
    ),
}


class HelpfulCommand(TyperCommand):
    """A command whose help shows arguments as a user types them, without braces and Python types."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. The error for an option without a value lacks its command, so it is added."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            told: Any = error
            if getattr(error, "ctx", ctx) is None:
                told.ctx = ctx
            raise

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the pieces of the usage line."""
        return [
            piece.replace("{", "").replace("}", "").replace("......", "...")
            for piece in super().collect_usage_pieces(ctx)
        ]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the sections of arguments and options, with defaults."""
        for title, kind in (("Arguments", "argument"), ("Options", "option")):
            records = [
                (name.partition(" ")[0] if kind == "argument" else name, _TOLD_DEFAULT.sub(r"default: \1", text))
                for parameter in self.get_params(ctx)
                if parameter.param_type_name == kind and (record := parameter.get_help_record(ctx))
                for name, text in [record]
            ]
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def group_of(name: str, about: str) -> typer.Typer:
    """Return a group to which verbs can be registered.

    Args:
        name: key of `GROUPS`.
        about: first sentence of its help.
    """
    return typer.Typer(
        name=name,
        short_help=GROUPS[name].line,
        help=about,
        epilog=examples(*GROUPS[name].examples),
        no_args_is_help=True,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def register(group: typer.Typer, function: Callable[..., None], name: str | None = None) -> None:
    """Register a function as a verb of the program (`group.info.name` is "sqrtdk") or of a group."""
    name = name or function.__name__
    verb = VERBS[name if group.info.name == "sqrtdk" else f"{group.info.name} {name}"]
    group.command(name, cls=HelpfulCommand, short_help=verb.line, epilog=examples(*verb.examples))(function)


def examples(*lines: str) -> str:
    """Return the examples below the options. The "\\b" keeps click from filling the lines as a paragraph."""
    return "\n".join(("\b", "Examples:", *(f"  {line}" for line in lines)))

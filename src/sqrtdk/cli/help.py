"""`--help` in the reader's language.

Typer keeps one text for each option. Ours are ids of the catalogue, which become text here, while help is drawn.
"""

from __future__ import annotations

import inspect
import re
import unicodedata
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

from sqrtdk.cli.options import refuse_file_of_json
from sqrtdk.cli.output import spoken
from sqrtdk.messages import Message, joined, said, word

_TYPERS_OWN = {  # names of the parameters that typer adds, with English help
    "help": "cli.options.help",
    "install_completion": "cli.options.install_completion",
    "show_completion": "cli.options.show_completion",
}
_DEFAULT_IS = "default: "
_WIDEST_NAME = 30  # columns; typer writes the text below a longer name
# Lines of Chinese may break between these: "[默认：", a run of narrow characters, or one wide character, each with the
# punctuation that must stay beside it.
_BREAKABLE = re.compile(r"\[\w+：|[（“\[]*(?:[\x21-\u02ff]+|[^\x00-\u02ff（“，。：；、）”])?[，。：；、）”]*\s*|\S\s*")

if TYPE_CHECKING:
    _Command = TyperCommand
else:
    _Command = object


class _Helpful(_Command):
    """Draws the help of a command or group, with arguments as a user types them: no braces, no Python types."""

    def get_short_help_str(self, limit: int = 45) -> str:
        """Return the line in the list of verbs."""
        return text(self.short_help or "")

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        """Write the usage line."""
        pieces = [text(re.sub(r"[{}]", "", piece)) for piece in self.collect_usage_pieces(ctx)]
        arguments = " ".join(pieces).replace("......", "...")
        formatter.write_usage(ctx.command_path, arguments, prefix=word("cli.words.usage", spoken()))

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Write what the command does."""
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(_filled(text(self.help or "").strip(), formatter.width - formatter.current_indent))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the sections of arguments and options, with defaults; of a group, the verbs too."""
        records = [(one.param_type_name, help_row(one, ctx)) for one in self.get_params(ctx)]
        _section(formatter, "cli.words.arguments", [row for kind, row in records if kind == "argument"])
        _section(formatter, "cli.words.options", [row for kind, row in records if kind == "option"])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples, each on a line as it is typed."""
        lines = ["\b", word("cli.words.examples", spoken())]
        for line in (self.epilog or "").split("\n"):
            command, mark, remark = line.partition("# ")
            lines.append(f"  {command}{mark}{text(remark)}")
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text("\n".join(lines))

    def first_example(self) -> str:
        """Return the first command of the examples."""
        return (self.epilog or "").partition("\n")[0].partition("# ")[0].strip()

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Return the completions of a word; some shells show the help of each."""
        completions = super().shell_complete(ctx, incomplete)
        for one in completions:
            one.help = one.help and text(one.help)
        return completions


class HelpfulCommand(_Helpful, TyperCommand):
    """A verb whose help is shown in the reader's language."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. The error for an option without a value lacks its command, so it is added.

        Raises:
            InvalidValueError: A file follows `--json`.
            typer.BadParameter: The word after an option that takes a value is an option itself: its value was left out.
        """
        options = [(name, option) for option in self.params for name in option.opts if name.startswith("-")]
        takes = {name: not getattr(option, "is_flag", True) for name, option in options}
        for name, value in pairwise(takewhile(lambda word: word != "--", args)):
            if takes.get(name) and value in takes:
                raise typer.BadParameter(
                    f"{value} is an option itself; the value was left out", ctx=ctx, param_hint=f"'{name}'"
                )
        words = tuple(args)  # typer takes them off
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            usage_error: Any = error
            _, too_many, extra = str(error).partition("Got unexpected extra argument(s) (")
            if too_many:
                refuse_file_of_json(words, extra.removesuffix(")").split())
            if getattr(error, "ctx", ctx) is None:
                usage_error.ctx = ctx
            raise


class HelpfulGroup(_Helpful, TyperGroup):
    """The program, or a group of verbs, whose help is shown in the reader's language."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the verb that was typed.

        click's error for a verb that does not exist lacks the words that were typed; they are added as `words`.
        """
        try:
            return super().resolve_command(ctx, args)
        except Exception as error:
            usage_error: Any = error
            usage_error.words = args
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the sections of the help: the options, then the verbs."""
        super().format_options(ctx, formatter)
        _section(formatter, "cli.words.commands", self.lines())

    def lines(self) -> list[tuple[str, str]]:
        """Return (name, text) for each verb, where the text is a line that says what it does."""
        return [(name, command.get_short_help_str()) for name, command in self.commands.items()]


def help_row(parameter: Any, ctx: Any) -> tuple[str, str]:
    """Return the row of an option or an argument in the help, in the reader's language.

    Args:
        parameter: A parameter of click.
        ctx: The context of its command.

    Returns:
        The name, as "--rows INTEGER"; and its text, followed by default and limits in brackets.
    """
    name, described = parameter.get_help_record(ctx)
    # typer appends "  [default: (cli.defaults.own); x>=1; required]"; a default in words is in brackets
    id, _, notes = described.rpartition("  [")
    shown = text(_TYPERS_OWN.get(parameter.name, id or notes))
    written = [_note(note) for note in notes.removesuffix("]").split("; ")] if id else []
    if written:
        shown += f"  [{said(joined(written), spoken())}]"
    return name.partition(" ")[0] if parameter.param_type_name == "argument" else name, shown


def _note(note: str) -> str:
    if note == "required":
        return word("cli.words.required", spoken())
    if note.startswith(_DEFAULT_IS):
        value = note.removeprefix(_DEFAULT_IS)
        value = value[1:-1] if value.startswith("(") else value
        return word("cli.words.default", spoken(), value=text(value))
    return note  # the limits of a number: x>=1


def text(words: str) -> str:
    """Return the text of an id of the catalogue ("cli.*") in the reader's language; return other words unchanged."""
    return Message(words).said(spoken()) if words.startswith("cli.") else words


def _section(formatter: Any, title: str, rows: list[tuple[str, str]]) -> None:
    if not rows:
        return
    formatter.write_paragraph()
    formatter.write(f"{word(title, spoken())}\n")
    first = min(max(len(name) for name, _ in rows), _WIDEST_NAME) + 2
    with formatter.indentation():
        formatter.write_dl([(name, _filled(text, formatter.width - first - 2)) for name, text in rows])


def _filled(text: str, width: int) -> str:
    r"""Return Chinese text in lines of at most `width` cells. "\b" keeps typer, which counts characters, off them."""
    if spoken() == "en":
        return text
    return "\n\n".join("\n".join(["\b", *_lines(paragraph, width)]) for paragraph in text.split("\n\n"))


def _lines(paragraph: str, width: int) -> list[str]:
    lines, room = [""], width
    for unit in _BREAKABLE.findall(inspect.cleandoc(paragraph).replace("\n", "")):
        cells = sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in unit.rstrip())
        if cells > room and lines[-1]:
            lines.append("")
            room = width
        lines[-1] += unit
        room -= cells + len(unit) - len(unit.rstrip())
    return [line.rstrip() for line in lines]

"""Options that several verbs share, each with its name, type and the id of its help text.

The options of loading a model stand in `LOADING`, those of an audit's reports in `audit_reports`. A verb takes them as
one object:

    def check(loading: Annotated[LoadOptions, LoadingFields()] = DEFAULT_LOADING, ...) -> None: ...

`register_verb` shows Typer an option for each field of the object.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer

from sqrtdk._language import Choice, Language, chosen
from sqrtdk.errors import InvalidValueError
from sqrtdk.messages import Message, joined
from sqrtdk.models.options import LoadOptions

STDOUT = "-"
DEFAULT_LOADING = LoadOptions()

LOADING: Mapping[str, Any] = {  # field of LoadOptions -> its option, in the order of --help
    "static": Annotated[bool, typer.Option("--static", help="cli.options.static")],
    "attn": Annotated[
        Literal["eager", "sdpa"] | None,
        typer.Option("--attn", help="cli.options.attn", show_default="cli.defaults.own"),
    ],
    "text": Annotated[
        Path | None,
        typer.Option("--text", metavar="FILE", help="cli.options.text", show_default="cli.defaults.text"),
    ],
    "input_file": Annotated[
        Path | None,
        typer.Option("--input", metavar="FILE", help="cli.options.input", show_default="cli.defaults.input"),
    ],
    "batch": Annotated[
        int | None, typer.Option("--batch", min=1, metavar="N", help="cli.options.batch", show_default="1")
    ],
    "seq_len": Annotated[
        int | None,
        typer.Option("--seq-len", min=1, metavar="N", help="cli.options.seq_len", show_default="cli.defaults.seq_len"),
    ],
    "device": Annotated[
        str | None, typer.Option("--device", metavar="DEVICE", help="cli.options.device", show_default="cpu")
    ],
    "dtype": Annotated[
        str | None,
        typer.Option("--dtype", metavar="DTYPE", help="cli.options.dtype", show_default="cli.defaults.own"),
    ],
    "seed": Annotated[int, typer.Option("--seed", metavar="N", help="cli.options.seed")],
    "revision": Annotated[
        str | None, typer.Option("--revision", metavar="NAME", help="cli.options.revision", show_default="main")
    ],
    "trust_remote_code": Annotated[bool, typer.Option("--trust-remote-code", help="cli.options.trust_remote_code")],
    "device_map": Annotated[
        str | None,
        typer.Option(
            "--device-map", metavar="MAP", help="cli.options.device_map", show_default="cli.defaults.device_map"
        ),
    ],
    "offload_folder": Annotated[
        Path | None,
        typer.Option(
            "--offload-folder",
            metavar="DIR",
            help="cli.options.offload_folder",
            show_default="cli.defaults.nowhere",
        ),
    ],
    "base": Annotated[
        Path | None,
        typer.Option("--base", metavar="DIR", help="cli.options.base", show_default="cli.defaults.base"),
    ],
}


@dataclass(frozen=True)
class Fields:
    """Says which fields of an object are options of a verb, where it annotates the verb's parameter.

    Attributes:
        default: The object, with the defaults of the options.
        options: Field -> its option, in the order of --help.
    """

    default: Any
    options: Mapping[str, Any]

    def parameters(self) -> list[inspect.Parameter]:
        """Return a keyword-only parameter for each field, with its default, annotated with its option for Typer."""
        return [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=getattr(self.default, name), annotation=option
            )
            for name, option in self.options.items()
        ]

    def taken(self, values: dict[str, Any]) -> Any:
        """Return the object with the values of its options.

        Args:
            values: Values of all options by parameter; those of this object are removed.
        """
        return replace(self.default, **{name: values.pop(name) for name in self.options if name in values})


class LoadingFields(Fields):
    """The fields of `LoadOptions`.

    Args:
        only: The fields, all of them by default.
        without: Fields that are left out.
        instead: Options of this verb's own, in place of those in `LOADING`.
    """

    def __init__(
        self, only: Iterable[str] = LOADING, without: Sequence[str] = (), instead: Mapping[str, Any] | None = None
    ) -> None:
        own = instead or {}
        # A misspelt name would leave the common option in place, or offer one that the verb ignores.
        assert {*only, *without, *own} <= LOADING.keys()
        shown = {name: own.get(name, LOADING[name]) for name in only if name not in without}
        super().__init__(DEFAULT_LOADING, shown)


Laws = Annotated[str | None, typer.Option("--laws", metavar="NAMES", help="cli.options.laws", show_default="all")]
LawsSeconds = Annotated[
    float | None,
    typer.Option("--laws-seconds", metavar="N", help="cli.options.laws_seconds", show_default="cli.defaults.no_bound"),
]
Json = Annotated[bool, typer.Option("--json", help="cli.options.json")]
Output = Annotated[Path | None, typer.Option("--output", metavar="FILE", help="cli.options.output")]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="cli.options.html")]
Sarif = Annotated[Path | None, typer.Option("--sarif", metavar="FILE", help="cli.options.sarif")]
Junit = Annotated[Path | None, typer.Option("--junit", metavar="FILE", help="cli.options.junit")]
Markdown = Annotated[str | None, typer.Option("--markdown", metavar="FILE", help="cli.options.markdown")]
Force = Annotated[bool, typer.Option("--force", help="cli.options.force")]
Severity = Literal["note", "warn", "unmeasured", "fail", "critical", "never"]
FailOn = Annotated[Severity, typer.Option("--fail-on", help="cli.options.fail_on")]
Workers = Annotated[
    int | None,
    typer.Option("--workers", min=1, metavar="N", help="cli.options.workers", show_default="cli.defaults.workers"),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray-address",
        metavar="HOST:PORT",
        help="cli.options.ray_address",
        show_default="cli.defaults.ray_address",
    ),
]
Lang = Annotated[Choice, typer.Option("--lang", help="cli.options.lang")]
ShowTraceback = Annotated[bool, typer.Option("--traceback", help="cli.options.traceback")]


def expanded(verb: Callable[..., None]) -> Callable[..., None]:
    """Return a verb as Typer reads it, with all parameters keyword-only.

    A parameter that is annotated with `Fields` becomes one parameter for each field; when called, the function makes
    the object of them and calls `verb`.
    """
    parameters: list[inspect.Parameter] = []
    objects: dict[str, Fields] = {}
    for parameter in inspect.signature(verb, eval_str=True).parameters.values():
        own = [one for one in getattr(parameter.annotation, "__metadata__", ()) if isinstance(one, Fields)]
        for fields in own:
            parameters += fields.parameters()
            objects[parameter.name] = fields
        if not own:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(verb)
    def called(**values: Any) -> None:
        verb(**{name: fields.taken(values) for name, fields in objects.items()}, **values)

    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return called


def whole_word(value: str) -> str:
    """Return the value that a short form of it means.

    Example:
        >>> whole_word("zh"), whole_word("en")
        ('zh-CN', 'en')
    """
    return "zh-CN" if value == "zh" else value


def language_of_choice(lang: Choice) -> Language:
    """Return the language, "en" or "zh", of the value of `--lang`; "auto" means that of the environment."""
    return chosen(lang, os.environ)


def language_asked_for(arguments: Sequence[str]) -> Language:
    """Return the language of a command line, before it is parsed: help and usage errors are in that language too.

    Example:
        >>> language_asked_for(["check", "--help", "--lang", "zh"]), language_asked_for(["check", "--lang=en"])
        ('zh', 'en')
    """
    choice: Choice = "auto"
    for option, following in zip(arguments, (*arguments[1:], ""), strict=False):
        name, equals, value = option.partition("=")
        value = whole_word(value if equals else following)
        if name == "--lang" and value in get_args(Choice):
            choice = value  # type: ignore[assignment]
    return language_of_choice(choice)


def refuse_ignored(given: Mapping[str, object], where: str, instead: str) -> None:
    """Refuse options that would be ignored silently.

    Args:
        given: option -> value; None and False mean that it was not given.
        where: phrase for the situation in which they are ignored: "with --static".
        instead: a command that lists the options which apply.

    Raises:
        InvalidValueError: an option was given.
    """
    names = [name for name, value in given.items() if value is not None and value is not False]
    if names:
        raise InvalidValueError(
            Message("errors.options.ignored", options=joined(names, "comma"), where=where),
            hint=Message(
                "errors.options.leave_it_out" if len(names) == 1 else "errors.options.leave_them_out", command=instead
            ),
        )


def refuse_file_of_json(words: Sequence[str], extra: Sequence[str]) -> None:
    """Refuse a file after `--json`, which takes none.

    Args:
        words: the command line.
        extra: its arguments that are too many.

    Raises:
        InvalidValueError: One of them follows `--json`.
    """
    for option, name in pairwise(words):
        if option == "--json" and name in extra:
            raise InvalidValueError(
                Message("errors.options.file_of_json", name=name), hint=Message("errors.hint.file_of_json")
            )


def file_or_stdout(name: str | None, taken: bool) -> Path | None:
    """Return the file that an option names; None if it names stdout or is not given.

    Args:
        name: the option's value.
        taken: whether stdout already receives another document.

    Raises:
        InvalidValueError: two documents would be on stdout.
    """
    if name == STDOUT and taken:
        raise InvalidValueError(Message("errors.options.both_on_stdout"), hint=Message("errors.options.file_for_one"))
    return None if name is None or name == STDOUT else Path(name)

"""Options of servers, which `check` and `diff` share, and `sqrtdk check http://...`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sqrtdk._language import Choice
from sqrtdk.cli import options
from sqrtdk.cli.audit_reports import AuditReports
from sqrtdk.cli.output import colors, print_text, say_written, tell_reader, width, working, write_stderr
from sqrtdk.messages import Message

if TYPE_CHECKING:
    from sqrtdk.answers.server import Server

Kind = Literal["openai", "vllm", "sglang", "llama-server", "ollama", "tgi", "tgi-prefill", "completions", "chat"]
REQUESTS, REQUEST_SECONDS, CHARACTERS = 200, 60.0, 480  # as in `sqrtdk.answers`, which imports torch


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How a server is asked; each field is the option of the same name, None where it is not given.

    Attributes:
        server_kind: The kind of server.
        server_model: Name of the model.
        server_requests: Requests that may be made.
        server_seconds: That one request may take.
        server_characters: Length of the prompts of the laws.
    """

    server_kind: Kind | None = None
    server_model: str | None = None
    server_requests: int | None = None
    server_seconds: float | None = None
    server_characters: int | None = None

    @property
    def by_option(self) -> dict[str, object]:
        """The options and their values, as `options.refuse_ignored` takes them."""
        return {f"--{field.name.replace('_', '-')}": getattr(self, field.name) for field in fields(self)}


NO_SERVER = ServerOptions()
SERVER: Mapping[str, Any] = {
    "server_kind": Annotated[
        Kind | None, typer.Option("--server-kind", metavar="KIND", help="cli.server.kind", show_default="openai")
    ],
    "server_model": Annotated[
        str | None,
        typer.Option(
            "--server-model", metavar="NAME", help="cli.server.model", show_default="cli.defaults.servers_own"
        ),
    ],
    "server_requests": Annotated[
        int | None,
        typer.Option("--server-requests", min=1, metavar="N", help="cli.server.requests", show_default=str(REQUESTS)),
    ],
    "server_seconds": Annotated[
        float | None,
        typer.Option("--server-seconds", min=0.1, metavar="N", help="cli.server.seconds", show_default="60"),
    ],
    "server_characters": Annotated[
        int | None,
        typer.Option(
            "--server-characters", min=64, metavar="N", help="cli.server.characters", show_default=str(CHARACTERS)
        ),
    ],
}
FOR_A_COMPARISON = {field: option for field, option in SERVER.items() if field != "server_characters"}
Servers = Annotated[ServerOptions, options.Fields(NO_SERVER, SERVER)]


def server_of(url: str, asked: ServerOptions, tokenizer: Any = None) -> Server:
    """Return the server of an address; requests are announced on stderr before they are made.

    Args:
        url: Its address.
        asked: How it is asked.
        tokenizer: The reference's, where prompts are token ids.
    """
    from sqrtdk.answers.server import Server

    return Server(
        url,
        model=asked.server_model or "",
        kind=asked.server_kind or "openai",
        tokenizer=tokenizer,
        most=asked.server_requests or REQUESTS,
        seconds=asked.server_seconds or REQUEST_SECONDS,
        announce=tell_reader,
    )


def check_address(
    url: str, asked: ServerOptions, laws: str | None, wanted: AuditReports, fail_on: str, lang: Choice
) -> int:
    """Ask a server the laws, print or write the report, and return the exit code.

    Args:
        url: Its address.
        asked: How it is asked.
        laws: Which laws; None for all.
        wanted: Which reports; a server has no page, SARIF log, JUnit report or comment.
        fail_on: Least severity of a finding that gives the exit code 1.
        lang: Language of the report.

    Raises:
        InvalidValueError: An option does not apply to a server.
        ModelError: The server can't be asked.
    """
    others = {name: value for name, value in wanted.by_option.items() if name not in ("--json", "--output")}
    options.refuse_ignored(others, Message("errors.options.with_server"), "sqrtdk check --help")
    with working(Message("progress.checking_server")):
        from sqrtdk.answers.server_report import check_server
        from sqrtdk.report.server.json import to_json
        from sqrtdk.report.server.terminal import server_summary_line, to_text

        report = check_server(
            server_of(url, asked),
            laws or "all",
            characters=asked.server_characters or CHARACTERS,
            fail_on=fail_on,
            command=shlex.join(["sqrtdk", *sys.argv[1:]]),
        )
    language = options.language_of_choice(lang)
    if wanted.output is not None:
        from sqrtdk import _files

        _files.write_text(wanted.output, to_json(report), wanted.force)
        say_written("JSON", wanted.output)
    if wanted.json_ and wanted.output is None:
        print_text(to_json(report))
        write_stderr(server_summary_line(report, language))
    else:
        print_text(to_text(report, width=width(), color=colors(), language=language))
    return report.exit_code

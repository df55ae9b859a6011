"""`check_server`: asks a server the laws, and says how many requests and tokens that took."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sqrtdk._progress import report_progress
from sqrtdk.answers.server import Server
from sqrtdk.answers.server_laws import SERVER_LAWS, AskedServer
from sqrtdk.audit.records import BROKEN, NOT_ASKED, Finding, LawAnswer, at_bar
from sqrtdk.errors import InvalidValueError, SqrtdkError, did_you_mean, said_by
from sqrtdk.laws.answers import state_of
from sqrtdk.messages import Message, joined
from sqrtdk.models.tokens import embedded_text

CHARACTERS = 480  # of a prompt
FEWEST_CHARACTERS = 64  # a fourth of the shortest prompt still has some tokens


@dataclass(frozen=True, slots=True)
class ServerReport:
    """What a server's answers say of it.

    Attributes:
        url: Its address.
        kind: How it was asked, a key of `DIALECTS`.
        model: The model's name that was sent; "" for none.
        laws: The answers of the laws, in the order of `SERVER_LAWS`.
        notes: What a reader has to know of its answers.
        requests: How many requests were made.
        tokens: Tokens of all prompts, as the server counts them; 0 if it does not.
        fail_on: Least severity of a finding that fails.
        command: The command line; None in Python.
    """

    url: str
    kind: str
    model: str
    laws: tuple[LawAnswer, ...]
    notes: tuple[str, ...] = ()
    requests: int = 0
    tokens: int = 0
    fail_on: str = "fail"
    command: str | None = None

    @property
    def broken(self) -> tuple[LawAnswer, ...]:
        """The answers of broken laws."""
        return tuple(answer for answer in self.laws if answer.state == BROKEN)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings of broken laws."""
        return tuple(answer.finding for answer in self.broken if answer.finding is not None)

    @property
    def exit_code(self) -> int:
        """1 if a finding is at `fail_on` or above, else 0."""
        return int(any(at_bar(self.fail_on, finding.severity, finding.rule) for finding in self.findings))

    def __repr__(self) -> str:
        states = [state_of([answer]) for answer in self.laws]
        names = ", ".join(answer.law for answer in self.broken)
        told = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states) if state != BROKEN)
        return f"ServerReport({self.url}; {'; '.join(filter(None, (names and f'broken: {names}', told)))})"


def laws_of(laws: str | Sequence[str]) -> tuple[str, ...]:
    """Return the laws of servers that an option names: "all", or names, in a sequence or joined by commas.

    Raises:
        InvalidValueError: A server is asked no such law.

    Example:
        >>> laws_of("batch, repeats"), len(laws_of("all"))
        (('repeats', 'batch'), 8)
    """
    words = [word.strip() for word in laws.split(",")] if isinstance(laws, str) else list(laws)
    if words == ["all"]:
        return tuple(SERVER_LAWS)
    if unknown := [word for word in words if word not in SERVER_LAWS]:
        raise InvalidValueError(
            Message("servers.no_law", law=repr(unknown[0]), near=did_you_mean(unknown[0], SERVER_LAWS)),
            hint=Message("errors.hint.laws", names=joined([*SERVER_LAWS], "comma")),
        )
    return tuple(name for name in SERVER_LAWS if name in words)


def check_server(
    server: Server, laws: str | Sequence[str] = "all", *, characters: int = CHARACTERS, text: str | None = None,
    fail_on: str = "fail", command: str | None = None,
) -> ServerReport:  # fmt: skip
    """Ask laws of a server: change one thing in what is sent, and look at what moves in its log-probabilities.

    Two rows of log-probabilities a and b are sqrt(sum_k exp(max(a_k, b_k)) (a_k - b_k)^2) nats apart. A law is broken
    if two rows that must be the same are more than 0.1 nats apart, and more than two answers to one prompt are.

    Args:
        server: The server. It needs no tokenizer: prompts are sent as text.
        laws: "all", or names of laws, in a sequence or joined by commas. `repeats` is always asked first.
        characters: Length of a prompt, at least 64; four of them are about one token of a usual vocabulary.
        text: What prompts are cut from; None for the text that `sqrtdk check` runs models on.
        fail_on: Least severity of a finding for which `exit_code` is 1.
        command: The command line, for the report.

    Returns:
        The answers. A law that the server makes empty is not asked, with the reason.

    Raises:
        InvalidValueError: There is no such law, or the laws take more requests than allowed.
        ModelError: The server can't be reached, takes too long, refuses, or gives no log-probabilities.
    """
    names = laws_of(laws)
    if characters < FEWEST_CHARACTERS:
        raise InvalidValueError(
            Message("servers.too_short", count=characters), hint=Message("servers.hint.longer", least=FEWEST_CHARACTERS)
        )
    planned = sum(SERVER_LAWS[name].requests for name in dict.fromkeys(("repeats", *names)))
    server.wire.check_room(planned)
    if server.announce is not None:
        server.announce(
            Message("servers.planned_laws", url=server.url, planned=planned, characters=characters, most=server.most)
        )
    source = "".join(letter for letter in (text or embedded_text()) if letter.isascii())
    asked = AskedServer(server, source * math.ceil(2 * characters / len(source)), characters)
    first = _answers(asked, "repeats")
    answers = list(first) if "repeats" in names else []
    for number, name in enumerate(names):
        if name == "repeats":
            continue
        report_progress(Message("servers.asking"), number, len(names))
        try:
            answers += _answers(asked, name)
        except SqrtdkError as error:  # the server answered before, so that this is about the law's own requests
            answers.append(LawAnswer(name, "", NOT_ASKED, Message("servers.laws.gave_up", error=said_by(error))))
    return ServerReport(
        server.url, server.kind, server.model, tuple(answers), tuple(server.notes), server.requests, server.tokens,
        fail_on, command,
    )  # fmt: skip


def _answers(asked: AskedServer, name: str) -> tuple[LawAnswer, ...]:
    return (SERVER_LAWS[name].ask(asked),)

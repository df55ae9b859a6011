"""Laws of a server: what its log-probabilities of a prompt must not depend on, asked over HTTP.

| law          | what is changed                          | what must hold                                |
|--------------|------------------------------------------|-----------------------------------------------|
| repeats      | nothing                                  | the answer stays                              |
| prefix       | what follows a prompt's beginning        | the rows of the beginning stay                |
| decoding     | a token is generated, instead of sent    | what is expected after it stays               |
| batch        | other prompts of one length come at once | the answer stays                              |
| lengths      | prompts of other lengths come at once    | the answer stays, whichever side is padded    |
| prefix_cache | the prompt was sent before               | the answer stays, with the cache and without  |
| chunks       | the prompt's beginnings were sent before | the answer stays                              |
| reach        | the first tokens                         | reads how far back a token moves what follows |

Prompts are sent as text, so that no tokenizer is needed. Rows are compared within one server, so that a shifted echo
does not matter. A law is kept only where something shows that it was put to the test.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile

from sqrtdk.answers.dialects import Listed, Reply, apart
from sqrtdk.answers.server import Server
from sqrtdk.audit.records import BROKEN, KEPT, NOT_ASKED, Finding, LawAnswer
from sqrtdk.messages import Message

EXACT_IN_JSON = 1e-5  # nats: what is left of float32 in JSON
HALF_ROUNDED = 0.1  # nats that another kernel in half precision may round: logits of 30 have steps of 2^-3
AT_ONCE = 4  # prompts
LESS_AT_ONCE = 0.6  # of the time that the prompts take one by one: answered in less, some ran together;
ALL_AT_END = 0.5  # and the first of them is not answered before half of the time of the last
GENERATED = 4  # tokens
CHANGED = 8  # characters at the beginning that `reach` changes
MARGIN = 2  # rows at the end without which a reach still counts as whole: the last may be those of a merged token


@dataclass(slots=True, eq=False)
class AskedServer:
    """A server that laws are asked of, and what is known of it so far.

    Attributes:
        server: The server.
        text: What prompts are cut from; ASCII.
        length: Characters of a prompt.
        floor: How far two answers to one prompt are apart, in nats.
        fresh: How many prompts and caches of their own were made.
    """

    server: Server
    text: str
    length: int
    floor: float = 0.0
    fresh: int = 0

    def prompt(self, number: int, length: int | None = None) -> str:
        """Return a part of the text, another one for each number; all of them are as long."""
        length = length or self.length
        step = max(1, (len(self.text) - self.length) // 16)  # 16 prompts, evenly spread
        return self.text[(number % 16) * step :][:length]

    def away(self) -> bool | str:
        """Return what keeps a request away from what the prefix cache holds, where the server can."""
        if self.server.dialect.switch == "own":
            self.fresh += 1
            return f"sqrtdk-{time.time_ns():x}-{self.fresh}"
        return self.server.dialect.switch != "off"

    def reply(
        self, prompt: Sequence[int] | str, *, generate: int = 1, echo: bool = True, cache: bool | str = True
    ) -> Reply:
        """Return the reply to one request; see `Server.reply`.

        Raises:
            ModelError: It fails, or lists no log-probabilities.
        """
        told = self.server.reply(prompt, generate=generate, echo=echo, cache=cache)
        if not told.generated and not (echo and any(told.prompt)):
            raise self.server.no_logprobs()
        return told

    @property
    def least(self) -> float:
        """Difference from which on an answer has moved, in nats."""
        return max(EXACT_IN_JSON, 2 * self.floor)


Law = Callable[[AskedServer], LawAnswer]


def ask_repeats(asked: AskedServer) -> LawAnswer:
    """The same prompt three times; the last two are as warm as each other, and give the floor of the other laws."""
    told = [asked.reply(asked.prompt(0)) for _ in range(3)]
    asked.floor = _most(told[1], told[2])
    return _judged(asked, "repeats", asked.floor, "fail")


def ask_prefix(asked: AskedServer) -> LawAnswer:
    """A prompt's beginning alone, and with two continuations."""
    if not asked.server.dialect.whole:
        return _not_tested("prefix", "servers.laws.no_rows")
    begun = asked.prompt(1, asked.length // 2)
    other = asked.prompt(1)[: asked.length // 2] + asked.prompt(9)[: asked.length // 2]
    told = [asked.reply(text) for text in (begun, asked.prompt(1), other)]
    worst, compared = 0.0, 0
    for one in (told[1], told[2]):
        shared = _shared(told[0].tokens, one.tokens)
        rows = [(a, b) for a, b in zip(told[0].prompt[:shared], one.prompt[:shared], strict=True) if a and b]
        compared += len(rows)
        worst = max([worst, *(apart(a, b) for a, b in rows)])
    if not compared:
        return _not_tested("prefix", "servers.laws.no_shared")
    return _judged(asked, "prefix", worst, "critical")


def ask_decoding(asked: AskedServer) -> LawAnswer:
    """Tokens that were generated one by one, and the same tokens sent with the prompt."""
    if asked.server.dialect.templated:
        return _not_tested("decoding", "servers.laws.templated")
    begun = asked.prompt(2)
    told = asked.reply(begun, generate=GENERATED, echo=asked.server.dialect.by_id, cache=asked.away())
    made = list(takewhile(lambda token: isinstance(token, int) or (token != "" and token.isascii()), told.made))
    worst, compared = 0.0, 0
    for count in range(1, min(len(made) + 1, len(told.generated))):
        sent = _with_tokens(asked.server, begun, told, made[:count])
        if sent is None:
            break
        again = asked.reply(sent, echo=False, cache=asked.away())
        if told.counted is None or again.counted != told.counted + count:  # its tokens merge otherwise in a text
            continue
        compared += 1
        worst = max(worst, apart(told.generated[count], again.generated[0]))
    if not compared:
        return _not_tested("decoding", "servers.laws.not_the_same_tokens")
    return _judged(asked, "decoding", worst, "fail")


def ask_batch(asked: AskedServer) -> LawAnswer:
    """Prompts of the same length, one by one and all at once."""
    return _at_once(asked, "batch", [asked.prompt(3 + number) for number in range(AT_ONCE)])


def ask_lengths(asked: AskedServer) -> LawAnswer:
    """Prompts of different lengths, one by one and all at once: the short ones are padded."""
    return _at_once(asked, "lengths", [asked.prompt(7 + n, max(asked.length >> n, 8)) for n in range(AT_ONCE)])


def ask_prefix_cache(asked: AskedServer) -> LawAnswer:
    """A prompt that the cache does not hold, the same again, and away from the cache."""
    own = asked.away() if asked.server.dialect.switch == "own" else True
    sent = _new(asked) + asked.prompt(11)
    cold, warm = (asked.reply(sent, echo=False, cache=own) for _ in range(2))
    told = [cold, *([asked.reply(sent, echo=False, cache=asked.away())] if asked.server.dialect.switch else [])]
    worst = max(apart(warm.generated[0], one.generated[0]) for one in told)
    return _of_the_cache(asked, "prefix_cache", worst, warm.cached)


def ask_chunks(asked: AskedServer) -> LawAnswer:
    """A prompt in one piece away from the cache, and piece by piece with it."""
    if not asked.server.dialect.switch:
        return _not_tested("chunks", "servers.laws.no_switch")
    sent = _new(asked) + asked.prompt(12)
    whole = asked.reply(sent, echo=False, cache=asked.away())
    own = asked.away() if asked.server.dialect.switch == "own" else True
    for part in (1, 2):
        asked.reply(sent[: len(sent) * part // 3], echo=False, cache=own)
    pieces = asked.reply(sent, echo=False, cache=own)
    return _of_the_cache(asked, "chunks", apart(whole.generated[0], pieces.generated[0]), pieces.cached)


def ask_reach(asked: AskedServer) -> LawAnswer:
    """A prompt, and the same with other first characters: the last row that moves tells how far back a token counts."""
    if not asked.server.dialect.whole:
        return _not_tested("reach", "servers.laws.no_rows")
    sent = asked.prompt(13)
    begun = "".join("z" if letter != "z" else "x" for letter in sent[:CHANGED])
    one, other = asked.reply(sent), asked.reply(begun + sent[CHANGED:])
    # the last one may be generated, and an echo lists it
    pairs = list(enumerate(zip(one.tokens, other.tokens, strict=False)))[:-1]
    differing = [place for place, (a, b) in pairs if a != b]
    if len(one.tokens) != len(other.tokens) or not differing or max(differing) > len(one.tokens) // 2:
        return _not_tested("reach", "servers.laws.no_shared")
    first = max(differing) + 1  # the first token behind the changed ones
    rows = list(zip(one.prompt, other.prompt, strict=True))[first:]
    moved = [number for number, (a, b) in enumerate(rows) if a and b and apart(a, b) > asked.least]
    farthest = moved[-1] if moved else 0
    whole = farthest >= len(rows) - 1 - MARGIN
    id = "servers.reach.whole" if whole else "servers.reach.bounded"
    reason = Message(id, tokens=farthest, asked=len(rows) - 1, least=f"{asked.least:.1g}")
    return LawAnswer("reach", "", KEPT, reason, moved=tuple(number in set(moved) for number in range(len(rows))))


@dataclass(frozen=True, slots=True)
class ServerLaw:
    """A law of servers.

    Attributes:
        ask: Returns its answer; any error of the server's is raised.
        requests: How many requests it makes at most.
    """

    ask: Law
    requests: int


SERVER_LAWS: dict[str, ServerLaw] = {
    "repeats": ServerLaw(ask_repeats, 3),
    "prefix": ServerLaw(ask_prefix, 3),
    "decoding": ServerLaw(ask_decoding, GENERATED),
    "batch": ServerLaw(ask_batch, 3 * AT_ONCE),
    "lengths": ServerLaw(ask_lengths, 3 * AT_ONCE),
    "prefix_cache": ServerLaw(ask_prefix_cache, 3),
    "chunks": ServerLaw(ask_chunks, 4),
    "reach": ServerLaw(ask_reach, 2),
}


def _at_once(asked: AskedServer, law: str, prompts: Sequence[str]) -> LawAnswer:
    def timed(workers: int) -> tuple[list[Reply], list[float], list[float]]:
        """Replies, seconds that each took, and seconds after which each was there, sorted."""
        ways = [asked.away() for _ in prompts]
        begun = time.monotonic()

        def reply(text: str, way: bool | str) -> tuple[Reply, float, float]:
            sent = time.monotonic()
            told = asked.reply(text, cache=way)
            return told, time.monotonic() - sent, time.monotonic() - begun

        with ThreadPoolExecutor(workers) as pool:
            told, each, when = zip(*pool.map(reply, prompts, ways), strict=True)
        return list(told), list(each), sorted(when)

    asked.server.wire.check_room(3 * len(prompts))
    alone, first, _ = timed(1)
    together, _, when = timed(len(prompts))
    _, second, _ = timed(1)  # the first time may be that of a cold server
    one_by_one = sum(map(min, first, second))  # the least that a server takes which answers one by one
    took = when[-1]
    overlapped = took < LESS_AT_ONCE * one_by_one and when[0] > ALL_AT_END * took
    worst = max(_most(one, other) for one, other in zip(alone, together, strict=True))
    if worst <= max(asked.least, HALF_ROUNDED) and not overlapped:
        return _not_tested(law, "servers.laws.one_by_one", took=f"{took:.2g}", alone=f"{one_by_one:.2g}")
    return _judged(asked, law, worst, "critical")


def _of_the_cache(asked: AskedServer, law: str, worst: float, cached: int | None) -> LawAnswer:
    if worst <= max(asked.least, HALF_ROUNDED) and not cached:
        return _not_tested(law, "servers.laws.cache_untold" if cached is None else "servers.laws.cache_unread")
    return _judged(asked, law, worst, "fail")


def _judged(asked: AskedServer, law: str, worst: float, severity: str) -> LawAnswer:
    """Return the answer of a law: kept, kept as far as half precision tells, or broken."""
    repeated = law == "repeats"  # which measures the floor that the others are held against
    if worst <= (EXACT_IN_JSON if repeated else asked.least):
        return LawAnswer(law, "", KEPT)
    moved = f"{worst:.2g}"
    if worst <= HALF_ROUNDED:
        return LawAnswer(law, "", KEPT, Message("servers.laws.rounded", moved=moved))
    values = {"count": AT_ONCE} if law in ("batch", "lengths") else {}
    message, fix = Message(f"servers.laws.{law}.broken", moved=moved, **values), Message(f"servers.laws.{law}.fix")
    finding = Finding(f"server_{law}", severity, "", worst, HALF_ROUNDED, message, fix, Message("servers.laws.source"))
    return LawAnswer(law, "", BROKEN, message, finding=finding)


def _not_tested(law: str, id: str, **values: str) -> LawAnswer:
    return LawAnswer(law, "", NOT_ASKED, Message(id, **values))


def _most(one: Reply, other: Reply) -> float:
    """Return how far the rows of two replies to one prompt are apart at most."""
    pairs: list[tuple[Listed | None, Listed | None]] = [
        *zip(one.prompt, other.prompt, strict=False), *zip(one.generated, other.generated, strict=False)
    ]  # fmt: skip
    return max((apart(a, b) for a, b in pairs if a and b), default=0.0)


def _shared(one: Sequence[int | str], other: Sequence[int | str]) -> int:
    """Return how many first tokens two lists share."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _new(asked: AskedServer) -> str:
    """Return words that no earlier prompt began with."""
    asked.fresh += 1
    return f"{time.time_ns() % 10**9:09d} {asked.fresh:02d} "


def _with_tokens(server: Server, begun: str, told: Reply, tokens: Sequence[int | str]) -> Sequence[int] | str | None:
    """Return a prompt with generated tokens behind it, or None if they can't be sent so."""
    if all(isinstance(token, str) for token in tokens):
        return begun + "".join(str(token) for token in tokens)
    if server.kind == "llama-server":
        return [begun, *tokens]  # type: ignore[list-item]  # it takes text and ids in one list
    listed = [token for token in told.tokens if isinstance(token, int)]
    return [*listed, *(int(token) for token in tokens)] if server.dialect.by_id and listed else None

"""A side that is a server: what it is asked, whether it cut the prompt into the same tokens, and which row is whose."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sqrtdk._progress import report_progress
from sqrtdk.answers.dialects import DIALECTS, Dialect, Listed, Reply, Request, apart
from sqrtdk.answers.rows import Answers, Prompt, answers_of_rows
from sqrtdk.answers.wire import KEY_VARIABLE, REQUEST_SECONDS, REQUESTS, Refused, Wire
from sqrtdk.errors import InvalidValueError, ModelError, did_you_mean
from sqrtdk.messages import Message, joined

LISTED_EACH = 20  # log-probabilities a place
FEWEST = 5  # what OpenAI's own completions give at most
PLACES = 24  # prefixes of a prompt after which a token is asked, where only generated tokens have log-probabilities
MOST_BOS = 2  # tokens that a server may put before a prompt: BOS, or BOS twice
SAME_ROW = 0.05  # nats, within which two rows are the same row: half precision rounds less
UNSTEADY = 0.1  # nats between two answers to one prompt, from which on nothing can be told
_BLANK = "\u2581"  # SentencePiece's mark of a blank
_UNCLEAR = "\ufffd"  # stands for the bytes of a token that are no whole character


class Tokenizer(Protocol):
    """What turns text into token ids and back, as in transformers."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of a text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        ...

    def __len__(self) -> int:
        """Return the number of tokens that it knows."""
        ...


@dataclass(slots=True, eq=False)
class Server:
    """A server that answers over HTTP.

    Nothing is sent before `ask`. The key is read from an environment variable, and is not part of the object.

    Attributes:
        url: Its address, as "http://127.0.0.1:8000/v1".
        model: Name of the model, for servers that have several.
        kind: How it is asked, a key of `sqrtdk.answers.DIALECTS`.
        tokenizer: The reference's, for kinds that take or return text.
        key_from: Environment variable that holds the key.
        most: Requests that may be made.
        seconds: That one request may take.
        top: Log-probabilities that are asked for at each place.
        places: For kinds without log-probabilities of the prompt: after how many prefixes one token is asked.
        announce: Is told how many requests are about to be made, before the first of them.
        shift: Tokens by which its rows of the prompt come too late: 1 if the row of each token is the one after it.
        added: Tokens that it puts before each prompt.
        noise: How far two answers to one prompt were apart, in nats.
        tokens: Tokens of all prompts that were sent.
        notes: What a reader of its answers has to know.

    Example:
        >>> server = Server("http://127.0.0.1:8000/v1", kind="vllm")
        >>> server.planned([(1, 2, 3)] * 4), server.requests
        (5, 0)
    """

    url: str
    model: str = ""
    kind: str = "openai"
    tokenizer: Tokenizer | None = field(default=None, repr=False)
    key_from: str = KEY_VARIABLE
    most: int = REQUESTS
    seconds: float = REQUEST_SECONDS
    top: int = LISTED_EACH
    places: int = PLACES
    announce: Callable[[str], None] | None = field(default=None, repr=False)
    shift: int = 0
    added: int = 0
    noise: float = 0.0
    tokens: int = 0
    notes: list[str] = field(default_factory=list)
    wire: Wire = field(init=False, repr=False)
    _vocabulary: dict[str, int | None] = field(default_factory=dict, repr=False)
    _spaced: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        """Check the kind, the address and the limits."""
        if self.kind not in DIALECTS:
            raise InvalidValueError(
                Message("servers.no_kind", kind=repr(self.kind), near=did_you_mean(self.kind, DIALECTS)),
                hint=Message("servers.hint.kinds", kinds=joined([*DIALECTS], "comma")),
            )
        self.wire = Wire(self.url, self.key_from, self.most, self.seconds)
        self.url = self.wire.url
        self.top = min(self.top, self.dialect.most)

    @property
    def dialect(self) -> Dialect:
        """How it is asked."""
        return DIALECTS[self.kind]

    @property
    def name(self) -> str:
        """What reports call it: its address."""
        return self.url

    @property
    def requests(self) -> int:
        """How many requests were made."""
        return self.wire.requests

    def planned(self, prompts: Sequence[Prompt]) -> int:
        """Return how many requests `ask` makes: those of prompts, one for the alignment, and one that is repeated."""
        each = 1 if self.dialect.whole else self.places
        return len(prompts) * each + 1 + (self.kind == "openai")

    def fitted(self, prompts: Sequence[Prompt]) -> tuple[Prompt, ...]:
        """Return the prompts as they come back from text, for kinds that take text: the tokens of what is sent."""
        if self.dialect.by_id or self.tokenizer is None:
            return tuple(prompts)
        encode, decode = self.tokenizer.encode, self.tokenizer.decode
        return tuple(tuple(encode(decode(list(prompt)), add_special_tokens=False)) for prompt in prompts)

    def ask(self, prompts: Sequence[Prompt]) -> Answers:
        """Return the log-probabilities that the server gives of prompts.

        Raises:
            InvalidValueError: It would take more requests than allowed, or the kind needs a tokenizer.
            ModelError: The server can't be reached, takes too long, refuses, gives no log-probabilities, cuts prompts
                into other tokens, knows other tokens, or answers the same prompt differently.
        """
        self._check_kind()
        planned = self.planned(prompts)
        self.wire.check_room(planned)
        parts = [
            (number, part)
            for number, prompt in enumerate(prompts)
            for part in ([prompt] if self.dialect.whole else self._prefixes(prompt))
        ]
        if self.announce is not None:
            sent = [*(len(part) for _, part in parts), *[len(parts[0][1])] * (planned - len(parts))] if parts else []
            self.announce(Message("servers.planned", url=self.url, planned=planned, tokens=sum(sent), most=self.most))
        texts = [self._sent(part) for _, part in parts]
        told = []
        for number, text in enumerate(texts):
            report_progress(Message("servers.asking"), number, len(texts))
            told.append(self.reply(text))
        rows: list[tuple[int, int, dict[int, float]]] = []
        if told:
            listed = (text for reply in told for row in [*reply.prompt, *reply.generated] if row for text in row)
            self._spaced = any(isinstance(text, str) and text[:1] == " " != text for text in listed)
            self._settle(texts, [part for _, part in parts], told)
        for (number, part), one in zip(parts, told, strict=True):
            rows += [(number, place, self._ids(row)) for place, row in self._placed(part, one)]
        found = [row for row in rows if row[2]]
        if not found:
            raise self.no_logprobs()
        return answers_of_rows(found)

    def reply(
        self, prompt: Sequence[int] | str, *, generate: int = 1, echo: bool = True, cache: bool | str = True
    ) -> Reply:
        """Return the reply to one request.

        Args:
            prompt: Token ids, or text.
            generate: How many tokens are generated.
            echo: Whether the prompt's own log-probabilities are asked for, where the kind has them.
            cache: Whether the server may read its prefix cache, or the name of a cache, where the kind has such.

        Raises:
            ModelError: The request fails, or what comes back has no place for log-probabilities. Lists that are empty
                are none: a server lists nothing where it ends the text at once.
        """
        request = Request(prompt, self.model, self.top, generate, echo, cache)
        try:
            document = self.wire.post(self.dialect.path, self.dialect.body(request))
        except Refused as error:
            if error.status not in (400, 422) or "logprob" not in str(error) or self.top <= FEWEST:
                raise
            self.top = FEWEST
            return self.reply(prompt, generate=generate, echo=echo, cache=cache)
        try:
            told = self.dialect.read(document, request)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            raise self.no_logprobs() from None
        self._check_values(told)
        self.tokens += told.counted if told.counted is not None else len(prompt) if not isinstance(prompt, str) else 0
        return told

    # -- what is sent, and whose rows come back ----------------------------------------------------------------------

    def _check_kind(self) -> None:
        if self.dialect.templated:
            raise InvalidValueError(Message("servers.templated"), hint=Message("servers.hint.templated"))
        if self.tokenizer is None and not self.dialect.by_id:
            raise InvalidValueError(
                Message("servers.no_tokenizer", kind=repr(self.kind)), hint=Message("servers.hint.tokenizer")
            )

    def _sent(self, prompt: Prompt) -> Sequence[int] | str:
        if self.dialect.by_id:
            return prompt
        assert self.tokenizer is not None
        text = self.tokenizer.decode(list(prompt))
        if tuple(self.tokenizer.encode(text, add_special_tokens=False)) != tuple(prompt):
            raise InvalidValueError(Message("servers.no_round_trip"), hint=Message("servers.hint.round_trip"))
        return text

    def _prefixes(self, prompt: Prompt) -> list[Prompt]:
        """Return beginnings of a prompt, evenly spread, that come back from text with the same tokens."""
        parts = prefixes(prompt, self.places)
        return parts if self.dialect.by_id else [part for part in parts if self.fitted([part])[0] == tuple(part)]

    def _settle(self, sent: Sequence[Sequence[int] | str], prompts: Sequence[Prompt], replies: Sequence[Reply]) -> None:
        """Find how rows belong to tokens, what stands before the prompts, and how steady the server is."""
        told, prompt = replies[0], prompts[0]
        before = self._listed_before(prompt, told)
        counted = told.counted - len(prompt) if told.counted is not None else before
        if not 0 <= counted <= MOST_BOS:
            raise ModelError(
                Message("servers.counts", url=self.url, counted=told.counted or 0, sent=len(prompt)),
                hint=Message("servers.hint.tokens"),
            )
        self.added = counted
        if self.kind == "openai":
            for text, ids, reply in zip(sent, prompts, replies, strict=True):
                alone = self.reply(text, echo=False)
                if alone.generated:  # where it ends the text at once it lists nothing
                    self._align(reply, self._listed_before(ids, reply) + len(ids), alone.generated[0])
                    break
        again = self.reply(sent[0])
        if (told.tokens or told.counted) != (again.tokens or again.counted):
            raise ModelError(Message("servers.other_tokens_again", url=self.url), hint=Message("servers.hint.steady"))
        pairs = zip([*told.prompt, *told.generated], [*again.prompt, *again.generated], strict=False)
        self.noise = max((apart(one, other) for one, other in pairs if one and other), default=0.0)
        if self.noise > UNSTEADY:
            raise ModelError(
                Message("servers.unsteady", url=self.url, noise=f"{self.noise:.3g}"),
                hint=Message("servers.hint.steady"),
            )
        if self.noise > 0:
            self.notes.append(Message("servers.noise", noise=f"{self.noise:.2g}"))
        widest = max((len(row) for row in [*told.prompt, *told.generated] if row), default=LISTED_EACH)
        if 2 * widest <= LISTED_EACH and self.kind not in ("tgi", "tgi-prefill"):
            self.notes.append(Message("servers.few", count=widest, asked=LISTED_EACH))

    def _align(self, told: Reply, behind: int, follows: Listed) -> None:
        """Find out whether the echo lists with each token what is expected at it, or what is expected after it.

        Without an echo, the first row is what follows the prompt. Among the echoed rows it stands behind the prompt's
        last token, or, where the echo is shifted, with that token.
        """
        rows = [told.prompt[place] if place < len(told.prompt) else None for place in (behind, behind - 1)]
        here, earlier = (row is not None and apart(row, follows) < SAME_ROW for row in rows)
        if earlier and not here:
            self.shift = 1
            self.notes.append(Message("servers.shifted"))

    def _listed_before(self, prompt: Prompt, told: Reply) -> int:
        """Return how many tokens the reply lists before those of the prompt.

        Raises:
            ModelError: It lists other tokens.
        """
        if not told.tokens:
            return 0
        best, before = max((self._agree(prompt, told.tokens, offset), -offset) for offset in range(MOST_BOS + 1))
        if best < len(prompt):
            raise ModelError(
                Message("servers.other_tokens", url=self.url, same=best, sent=len(prompt)),
                hint=Message("servers.hint.tokens"),
            )
        return -before

    def _agree(self, prompt: Prompt, listed: Sequence[int | str], offset: int) -> int:
        """Return how many tokens are the same, if the prompt begins at an offset of the list."""
        shown = list(listed[offset : offset + len(prompt)])
        return sum(self._same(own, other) for own, other in zip(prompt, shown, strict=False))

    def _same(self, own: int, listed: int | str) -> bool:
        if isinstance(listed, int) or self.tokenizer is None:
            return own == listed
        text = self.tokenizer.decode([own])
        # a part of a character is shown as nothing, or as a mark; a leading blank is shown by some and not by others
        return _UNCLEAR in text + listed or not listed or text.strip() == listed.strip()

    def _placed(self, prompt: Prompt, told: Reply) -> list[tuple[int, Listed]]:
        """Return the rows of a reply with the number of the last token of the prompt that each has seen."""
        if not self.dialect.whole:
            return [(len(prompt) - 1, told.generated[0])] if told.generated else []
        before = self._listed_before(prompt, told)
        rows = [
            (place - 1 + self.shift, row)
            for place, row in enumerate(told.prompt[before : before + len(prompt) + 1 - self.shift])
            if row and place - 1 + self.shift >= 0
        ]
        return rows + ([(len(prompt) - 1, told.generated[0])] if told.generated else [])

    def _ids(self, listed: Listed) -> dict[int, float]:
        """Return log-probabilities by token id; a text that several tokens share names none of them.

        Raises:
            ModelError: The tokens are not the tokenizer's.
        """
        texts = {text: value for text, value in listed.items() if isinstance(text, str)}
        known = self._texts() if texts else {}
        unknown = sum(text not in known for text in texts)
        size = len(self.tokenizer) if self.tokenizer is not None else math.inf
        unknown += sum(token >= size for token in listed if isinstance(token, int))
        if 2 * unknown > len(listed):
            raise ModelError(
                Message("servers.other_vocabulary", url=self.url, unknown=unknown, listed=len(listed)),
                hint=Message("servers.hint.tokens"),
            )
        found = {token: value for token, value in listed.items() if isinstance(token, int) and token < size}
        return found | {token: value for text, value in texts.items() if (token := known.get(text)) is not None}

    def _texts(self) -> dict[str, int | None]:
        if not self._vocabulary and self.tokenizer is not None:
            for token in range(len(self.tokenizer)):
                text = self._text(token)
                self._vocabulary[text] = None if text in self._vocabulary else token
        return self._vocabulary

    def _text(self, token: int) -> str:
        """Return the text of a token as the server shows it.

        SentencePiece has "▁the" and "the", and decodes each of them alone as "the"; most servers show the first one as
        " the".
        """
        assert self.tokenizer is not None
        pieces = getattr(self.tokenizer, "convert_ids_to_tokens", None)
        if self._spaced and pieces is not None and str(piece := pieces(token)).startswith(_BLANK):
            return str(piece).replace(_BLANK, " ")
        return self.tokenizer.decode([token])

    # -- what a reply may not be --------------------------------------------------------------------------------------

    def _check_values(self, told: Reply) -> None:
        rows = [row for row in [*told.prompt, *told.generated] if row]
        wrong = next((value for row in rows for value in row.values() if math.isnan(value) or value > 0.01), None)
        if wrong is not None:
            raise ModelError(
                Message("servers.no_probability", url=self.url, value=f"{wrong:g}"),
                hint=Message("servers.hint.not_api"),
            )

    def no_logprobs(self) -> ModelError:
        """Return the error that the server gave no log-probabilities."""
        others = joined([kind for kind in DIALECTS if kind != self.kind], "comma")
        return ModelError(
            Message("servers.no_logprobs", url=self.url, kind=repr(self.kind)),
            hint=Message("servers.hint.no_logprobs", kinds=others),
        )


def prefixes(prompt: Prompt, count: int) -> list[Prompt]:
    """Return beginnings of a prompt, evenly spread, the whole one among them.

    Example:
        >>> [len(part) for part in prefixes(tuple(range(10)), 3)]
        [3, 6, 10]
    """
    return [prompt[: max(1, len(prompt) * part // count)] for part in range(1, count + 1)]

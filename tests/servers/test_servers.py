"""A server's rows are those of the model behind it, in every kind, with and without BOS, and shifted."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from sqrtdk.answers import DIALECTS, Server, diff_answers
from sqrtdk.errors import InvalidValueError
from tests.servers.served import BOS, Letters, Served, model, serving

TEXT = "He had a rule for himself: a number first, then a word, then, if"
PROMPT = tuple(map(ord, TEXT))
BY_ID = [kind for kind, dialect in DIALECTS.items() if dialect.by_id]


@pytest.fixture(scope="module")
def decoder() -> Any:
    return model()


def oracle(decoder: torch.nn.Module, bos: int) -> torch.Tensor:
    with torch.no_grad():
        logits = decoder(torch.tensor([[BOS] * bos + list(PROMPT)])).logits[0, bos:]
    return logits.double().log_softmax(-1)


def furthest(server: Server, expected: torch.Tensor) -> tuple[int, float]:
    """Number of rows, and the largest difference from the model's own log-probabilities."""
    answers = server.ask([PROMPT])
    own = expected[answers.position].gather(-1, answers.ids.clamp_min(0))
    return len(answers), float((own - answers.values)[answers.ids >= 0].abs().max())


@pytest.mark.parametrize("kind", ["openai", "vllm", *(pytest.param(k, marks=pytest.mark.full) for k in (
    "sglang", "llama-server", "ollama", "tgi", "tgi-prefill", "completions"
))])  # fmt: skip
def test_rows_are_the_models(kind: str, decoder: Any) -> None:
    with serving(Served(decoder, batches=False)) as url:
        server = Server(url, kind=kind, tokenizer=Letters(), places=6)
        rows, error = furthest(server, oracle(decoder, 0))
    whole = DIALECTS[kind].whole
    assert rows == (64 if whole else 6)
    assert error < 1e-5
    assert (server.shift, server.added, server.noise) == (0, 0, 0.0)
    assert server.requests == server.planned([PROMPT])


@pytest.mark.full
@pytest.mark.parametrize("bos", [1, 2])
@pytest.mark.parametrize("kind", [kind for kind in DIALECTS if kind not in (*BY_ID, "chat", "tgi")])
def test_what_the_server_puts_before_a_text_is_counted(kind: str, bos: int, decoder: Any) -> None:
    with serving(Served(decoder, bos=bos, batches=False)) as url:
        server = Server(url, kind=kind, tokenizer=Letters(), places=6)
        _, error = furthest(server, oracle(decoder, bos))
    assert server.added == bos
    assert error < 1e-5


def test_a_shifted_echo_is_found_and_moved_back(decoder: Any) -> None:
    with serving(Served(decoder, "shifted", batches=False)) as url:
        server = Server(url, tokenizer=Letters())
        rows, error = furthest(server, oracle(decoder, 0))
    assert server.shift == 1
    assert rows == 63
    assert error < 1e-5
    assert [note.id for note in server.notes] == ["servers.shifted"]  # type: ignore[attr-defined]


def test_the_key_comes_from_the_environment_and_is_shown_nowhere(decoder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-another-server")
    served = Served(decoder, batches=False)
    with serving(served) as url:
        Server(url, kind="vllm").ask([PROMPT])
        assert all("Authorization" not in headers for headers in served.headers)
        monkeypatch.setenv("SQRTDK_SERVER_KEY", "sk-secret")
        server = Server(url, kind="vllm")
        server.ask([PROMPT])
    assert served.headers[-1]["Authorization"] == "Bearer sk-secret"
    assert "secret" not in repr(server) + repr(server.wire) + json.dumps(served.asked)


def test_requests_are_announced_counted_and_limited_before_the_first(decoder: Any) -> None:
    served, told = Served(decoder, batches=False), []
    with serving(served) as url:
        server = Server(url, kind="vllm", most=4, announce=told.append)
        server.ask([PROMPT])
        assert len(told) == 1
        assert str(told[0]).startswith(f"2 requests of {url}, about 128 tokens")
        assert server.requests == len(served.asked) == 2
        assert server.tokens == 128
        with pytest.raises(InvalidValueError, match="4 requests are needed; 2 of 4 are left"):
            server.ask([PROMPT, PROMPT, PROMPT])
    assert len(served.asked) == 2


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1:8000", "ftp://host", "http://", "http://user:pw@host", "http://host/v1?key=sk-1", "http://h:x"],
)
def test_an_address_is_http_and_holds_no_secret(address: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        Server(address)
    assert "sk-1" not in str(caught.value)
    assert "pw" not in str(caught.value)


def test_a_kind_that_takes_text_needs_a_tokenizer_and_prompts_that_survive() -> None:
    with pytest.raises(InvalidValueError, match="no tokenizer"):
        Server("http://127.0.0.1:9").ask([PROMPT])

    class Merging(Letters):
        def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
            return super().encode(text.replace("  ", " "))

    server = Server("http://127.0.0.1:9", tokenizer=Merging())
    with pytest.raises(InvalidValueError, match="changes its tokens"):
        server.ask([(65, 32, 32, 66)])
    assert server.fitted([(65, 32, 32, 66)]) == ((65, 32, 66),)
    assert server.requests == 0


@pytest.mark.parametrize("kind", ["chat", "no-such"])
def test_a_kind_that_can_not_be_compared_is_refused(kind: str) -> None:
    with pytest.raises(InvalidValueError):
        Server("http://127.0.0.1:9", kind=kind, tokenizer=Letters()).ask([PROMPT])


class Pieces(Letters):
    """Letters, of which the upper ones are pieces that begin with a blank: "▁a" for A."""

    def convert_ids_to_tokens(self, token: int) -> str:
        return "\u2581" + chr(token).lower() if 65 <= token <= 90 else chr(token)

    def decode(self, ids: Any) -> str:
        text = "".join(self.convert_ids_to_tokens(token) for token in ids).replace("\u2581", " ")
        return text.removeprefix(" ")

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return list(map(ord, text))


@pytest.mark.parametrize("spaced", [True, False])
def test_pieces_that_begin_with_a_blank_are_told_from_those_that_do_not(spaced: bool, decoder: Any) -> None:
    pieces = Pieces()

    class Spelling(Served):
        def text_keys(self, listed: dict[int, float]) -> dict[str, float]:
            shown = [pieces.convert_ids_to_tokens(token).replace("\u2581", " " if spaced else "") for token in listed]
            return dict(zip(shown, listed.values(), strict=True))

    prompt = tuple(map(ord, "a small thing, one number in one line"))
    with serving(Spelling(decoder, batches=False)) as url:
        answers = Server(url, tokenizer=pieces).ask([prompt])
    named = set(answers.ids.flatten().tolist())
    upper, lower = named & set(range(65, 91)), named & set(range(97, 123))
    # without blanks "a" may be either, and is left out
    assert (bool(upper), bool(lower)) == (spaced, spaced)
    with torch.no_grad():
        own = decoder(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
    apart = own[answers.position].gather(-1, answers.ids.clamp_min(0)) - answers.values
    assert float(apart[answers.ids >= 0].abs().max()) < 1e-5


@pytest.mark.full
@pytest.mark.parametrize("kind", ["openai", "sglang", "llama-server"])
def test_a_planted_mistake_is_named_over_each_way_of_asking(kind: str, decoder: Any) -> None:
    wrong = model()
    wrong.model.rotary_emb.inv_freq.copy_(500000.0 ** (-torch.arange(4) / 4))
    letters = "He had a rule for himself: a number first, then a word, then, if the day had earned it, a sentence."
    prompts = [tuple(map(ord, letters[at : at + 72])) for at in (0, 10, 20)]
    with serving(Served(wrong, batches=False)) as url:
        server = Server(url, kind=kind, tokenizer=Letters())
        report = diff_answers(decoder, server, prompts)
    assert report.verdict == "proven"
    assert [(cause.name, cause.b) for cause in report.causes] == [("rope_base", 500000.0)]
    assert report.requests == server.requests == {"openai": 5, "sglang": 4}.get(kind, 73)
    assert report.tokens == server.tokens

"""Bad servers: each is told in one sentence."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from sqrtdk.answers.server import Server
from sqrtdk.errors import ModelError
from tests.servers.served import Letters, Served, changed, model, serving

PROMPT = tuple(map(ord, "He had a rule for himself: a number first"))


@pytest.fixture(scope="module")
def decoder() -> Any:
    return model()


def error_of(url: str, kind: str = "vllm", **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        Server(url, kind=kind, tokenizer=Letters(), **options).ask([PROMPT])
    assert caught.value.hint
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(url, "URL")


def no_logprobs(_handler: Any, reply: Any) -> Any:
    reply["choices"][0]["logprobs"] = None
    return reply


def shuffled_ids(_handler: Any, reply: Any) -> Any:
    reply["choices"][0]["prompt_token_ids"] = reply["choices"][0]["prompt_token_ids"][::-1]
    return reply


def fewer_tokens(_handler: Any, reply: Any) -> Any:
    reply["usage"]["prompt_tokens"] //= 2
    return reply


def wide_vocabulary(_handler: Any, reply: Any) -> Any:
    choice = reply["choices"][0]
    choice["prompt_logprobs"] = [
        row and {str(int(token) + 5000): entry for token, entry in row.items()} for row in choice["prompt_logprobs"]
    ]
    return reply


def probabilities(_handler: Any, reply: Any) -> Any:
    return changed(reply, lambda value: -value)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda _h, _r: b"<html>welcome</html>", "URL answered with something that is no JSON object"),
        (lambda _h, _r: ["a", "b"], "URL answered with something that is no JSON object"),
        (lambda h, _r: h.send_json(307, b""),
         "URL sends the request to another address (status 307), and it is not followed there"),
        (lambda h, _r: h.send_json(500, b"out of\nmemory"), "URL refused with status 500: out of memory"),
        (no_logprobs, "URL gave no log-probabilities as a server of kind 'vllm' does"),
        (shuffled_ids, "URL cuts the prompt into other tokens: 3 of 41 are the same"),
        (fewer_tokens, "URL counts 20 tokens in a prompt of 41"),
        (wide_vocabulary, "URL lists tokens that the reference does not know: 20 of 20 at one place"),
        (probabilities, "URL gave 11.5 as a log-probability"),
    ],
)  # fmt: skip
def test_a_bad_reply_is_told_in_one_sentence(spoil: Any, sentence: str, decoder: Any) -> None:
    with serving(Served(decoder, batches=False), spoil) as url:
        told = error_of(url)
    shown = sentence.split(" ")
    assert len(told.split(" ")) == len(shown)
    # the numbers are those of random weights
    assert [a for a in told.split(" ") if not a[0].isdigit()] == [b for b in shown if not b[0].isdigit()]


def test_a_server_that_refuses_the_connection() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert error_of(f"http://127.0.0.1:{port}") == "URL refuses the connection"


def test_a_name_that_leads_nowhere() -> None:
    assert error_of("http://no-such-host.invalid") == "URL has a name that leads nowhere"


def test_https_of_a_server_that_speaks_none(decoder: Any) -> None:
    with serving(Served(decoder, batches=False)) as url:
        assert error_of(url.replace("http:", "https:")) == "URL speaks no TLS, or its certificate is not trusted"


@contextmanager
def speaking(lines: Any, every: float = 0.05) -> Iterator[str]:
    """A server that takes each request, and says lines slowly."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(8)
        over = threading.Event()

        def serve() -> None:
            while not over.is_set():
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(2**16)
                    for line in lines:
                        if over.wait(every):
                            return
                        try:
                            connection.sendall(line)
                        except OSError:
                            break

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            over.set()
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_a_server_that_stalls_at_once_or_drips() -> None:
    with speaking([b""] * 200) as url:
        assert error_of(url, seconds=0.3) == "URL did not answer within 0.3 s"
    begun = time.monotonic()
    with speaking([b"HTTP/1.1 200 OK\r\nContent-Length: 4000\r\n\r\n", *[b"{"] * 400], 0.02) as url:
        assert error_of(url, seconds=0.3) == "URL did not answer within 0.3 s"
    assert time.monotonic() - begun < 5


def test_a_server_that_breaks_off() -> None:
    with speaking([b"HTTP/1.1 200 OK\r\nContent-Length: 4000\r\n\r\n{"], 0) as url:
        assert error_of(url) == "URL broke off the connection before it had answered"


def test_a_refusal_that_quotes_the_key_does_not_show_it(decoder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQRTDK_SERVER_KEY", "sk-secret")
    with serving(Served(decoder, batches=False), lambda h, _: h.send_json(401, b"no such key: sk-secret")) as url:
        assert error_of(url) == "URL refused with status 401: no such key: ***"


def test_a_busy_server_is_asked_again_and_each_time_counts(decoder: Any) -> None:
    times = iter(range(9))

    def busy(handler: Any, reply: Any) -> Any:
        return handler.send_json(503, b"loading") if next(times) == 0 else reply

    with serving(Served(decoder, batches=False), busy) as url:
        server = Server(url, kind="vllm")
        server.ask([PROMPT])
    assert server.requests == server.planned([PROMPT]) + 1


def test_a_server_that_answers_differently_each_time(decoder: Any) -> None:
    with serving(Served(decoder, "repeats", batches=False)) as url:
        told = error_of(url)
    assert told.startswith("URL is not deterministic: two answers to one prompt are ")


def test_a_server_that_gives_five_is_asked_for_five(decoder: Any) -> None:
    served = Served(decoder, batches=False)

    def five(handler: Any, reply: Any) -> Any:
        if served.asked[-1]["logprobs"] > 5:
            return handler.send_json(400, b"logprobs must be at most 5")
        return reply

    with serving(served, five) as url:
        server = Server(url, tokenizer=Letters())
        answers = server.ask([PROMPT])
    assert len(answers) == len(PROMPT)
    assert answers.ids.shape[1] == 6
    assert [str(note) for note in server.notes] == [
        "it gives 6 log-probabilities a place, not 20: small differences may stay hidden"
    ]

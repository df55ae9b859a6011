"""How kinds of servers are asked for log-probabilities, and how their replies are read: one literal table.

| kind         | served by                              | log-probabilities of    | asked by                           |
|--------------|----------------------------------------|-------------------------|------------------------------------|
| openai       | OpenAI, vLLM, SGLang, llama-cpp-python | the prompt              | `echo`, `logprobs`                 |
| vllm         | vLLM                                   | the prompt, by token id | `prompt_logprobs`                  |
| sglang       | SGLang                                 | the prompt, by token id | `/generate`, `return_logprob`      |
| llama-server | llama.cpp                              | generated tokens, by id | `/completion`, `n_probs`           |
| ollama       | Ollama since 0.12.11                   | generated tokens        | `/api/generate`, `logprobs`, `raw` |
| tgi          | text-generation-inference              | generated tokens, by id | `/generate`, `top_n_tokens`        |
| tgi-prefill  | text-generation-inference              | the prompt's own tokens | `decoder_input_details`            |
| completions  | any of `openai`, without echo          | generated tokens        | `logprobs`                         |
| chat         | OpenAI's chat completions              | generated tokens        | `logprobs`, behind a template      |

Where only generated tokens have log-probabilities, one token is asked after each of some prefixes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Listed = dict[int | str, float]  # log-probabilities by token id, or by the token's text
Json = Mapping[str, Any]

_WRITTEN_MINUS_INFINITY = -9999.0  # vLLM writes minus infinity so, which JSON does not have


@dataclass(frozen=True, slots=True)
class Request:
    """What a server is asked.

    Attributes:
        prompt: Token ids, or text.
        model: Name of the model; "" for servers that have one.
        top: How many log-probabilities are asked for at each place.
        generate: How many tokens are generated, greedily.
        echo: Whether the prompt's own log-probabilities are asked for.
        cache: Whether the server may read its prefix cache; a text names a cache of its own, where it keeps several.
    """

    prompt: Sequence[int] | str
    model: str = ""
    top: int = 20
    generate: int = 1
    echo: bool = True
    cache: bool | str = True


@dataclass(frozen=True, slots=True)
class Reply:
    """What a server replied.

    Attributes:
        prompt: What it expected at each token that it lists of the prompt; None where it gives nothing.
        generated: What it expected at each generated token.
        tokens: The tokens that `prompt` belongs to, as ids or texts, and of `openai` the generated ones as well; empty
            if it does not tell them.
        made: The generated tokens, as ids or texts; empty if they are not told apart.
        counted: How many tokens it counts in the prompt; None if it does not tell.
        cached: How many of these it took from its prefix cache; None if it does not tell.
    """

    prompt: list[Listed | None] = field(default_factory=list)
    generated: list[Listed] = field(default_factory=list)
    tokens: list[int | str] = field(default_factory=list)
    made: list[int | str] = field(default_factory=list)
    counted: int | None = None
    cached: int | None = None


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one kind of server is asked.

    Attributes:
        path: What follows the address.
        body: Returns the JSON of a request.
        read: Returns the reply that a JSON document holds, given the request.
        whole: Whether the prompt               has log-probabilities.
        by_id: Whether it takes token ids.
        most: How many log-probabilities a place can be asked for.
        switch: How a request keeps away from the prefix cache: "off" turns it off, "own" names one of its own.
        templated: Whether the prompt is wrapped by a chat template.
    """

    path: str
    body: Callable[[Request], dict[str, Any]]
    read: Callable[[Json, Request], Reply]
    whole: bool
    by_id: bool
    most: int
    switch: Literal["", "off", "own"] = ""
    templated: bool = False


def _value(number: Any) -> float:
    return -math.inf if float(number) <= _WRITTEN_MINUS_INFINITY else float(number)


def _key(token: str) -> int | str:
    # vLLM with --return-tokens-as-token-ids writes "token_id:12"
    name, colon, number = token.partition(":")
    return int(number) if name == "token_id" and colon and number.isdecimal() else token


def _named(request: Request) -> dict[str, Any]:
    return {"model": request.model} if request.model else {}


def _entries(entries: Sequence[Json], key: str) -> Listed:
    return {entry[key]: _value(entry["logprob"]) for entry in entries}


def _usage(reply: Json) -> dict[str, Any]:
    usage = reply.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    return {"counted": usage.get("prompt_tokens"), "cached": details.get("cached_tokens")}


# -- OpenAI's completions: keys are texts, the first token has no row, the generated tokens stand behind the prompt's --


def _by_text(row: Mapping[str, Any]) -> Listed:
    # llama-cpp-python shows each token that is a part of a character as "", one in place of another
    return {_key(token): _value(number) for token, number in row.items() if token}


def _openai_body(request: Request) -> dict[str, Any]:
    prompt = request.prompt if isinstance(request.prompt, str) else list(request.prompt)
    asked = {"prompt": prompt, "max_tokens": request.generate, "logprobs": request.top, "temperature": 0}
    return _named(request) | asked | ({"echo": True} if request.echo else {})


def _openai_read(reply: Json, request: Request) -> Reply:
    choice = reply["choices"][0]
    told = choice["logprobs"]
    rows = [row and _by_text(row) for row in told["top_logprobs"]]
    tokens = [_key(token) for token in told["tokens"]]
    if not request.echo:
        return Reply([], [row for row in rows if row], [], tokens, **_usage(reply))
    return Reply(rows, [], tokens, [], **_usage(reply))


def _completions_body(request: Request) -> dict[str, Any]:
    return _openai_body(replace(request, echo=False))


def _completions_read(reply: Json, request: Request) -> Reply:
    return _openai_read(reply, replace(request, echo=False))


# -- vLLM: for each place {"token id": {"logprob": ..., "rank": ...}} --------------------------------------------------


def _vllm_body(request: Request) -> dict[str, Any]:
    own = {"cache_salt": request.cache} if isinstance(request.cache, str) else {}
    echo = {"prompt_logprobs": request.top} if request.echo else {}
    asked = _openai_body(replace(request, echo=False))
    return asked | echo | own | {"return_tokens_as_token_ids": True, "return_token_ids": True}


def _vllm_read(reply: Json, _request: Request) -> Reply:
    choice = reply["choices"][0]
    rows: list[Listed | None] = [
        row and {int(token): _value(entry["logprob"]) for token, entry in row.items()}
        for row in choice.get("prompt_logprobs") or ()
    ]
    told = choice["logprobs"]["top_logprobs"]
    generated = [_by_text(row) for row in told if row]
    tokens = list(choice.get("prompt_token_ids") or ()) if rows else []
    return Reply(rows, generated, tokens, list(choice.get("token_ids") or ()), **_usage(reply))


# -- SGLang: for each place a list of [logprob, token id, text] --------------------------------------------------------


def _sglang_body(request: Request) -> dict[str, Any]:
    prompt = {"text": request.prompt} if isinstance(request.prompt, str) else {"input_ids": list(request.prompt)}
    own = {"extra_key": request.cache} if isinstance(request.cache, str) else {}
    # -1: of generated tokens alone; only then the cache is read
    asked = {"return_logprob": True, "logprob_start_len": 0 if request.echo else -1, "top_logprobs_num": request.top}
    return prompt | {"sampling_params": {"max_new_tokens": request.generate, "temperature": 0}} | asked | own


def _sglang_read(reply: Json, _request: Request) -> Reply:
    told = reply["meta_info"]

    def row(entries: Any) -> Listed | None:
        return {int(token): _value(number) for number, token, *_ in entries} if entries else None

    return Reply(
        [row(entries) for entries in told.get("input_top_logprobs") or ()],
        [found for entries in told["output_top_logprobs"] if (found := row(entries))],
        [int(entry[1]) for entry in told.get("input_token_logprobs") or ()],
        [int(entry[1]) for entry in told.get("output_token_logprobs") or ()],
        told.get("prompt_tokens"),
        told.get("cached_tokens"),
    )


# -- llama.cpp's llama-server ------------------------------------------------------------------------------------------


def _llama_body(request: Request) -> dict[str, Any]:
    prompt = request.prompt if isinstance(request.prompt, str) else list(request.prompt)
    asked = {"prompt": prompt, "n_predict": request.generate, "n_probs": request.top, "return_tokens": True}
    # below 0 the token is the likeliest, and the numbers are those of a plain softmax
    return _named(request) | asked | {"temperature": -1, "cache_prompt": request.cache is True}


def _llama_read(reply: Json, _request: Request) -> Reply:
    told = reply["completion_probabilities"]
    rows = [_entries(entry["top_logprobs"], "id") for entry in told]
    cached = (reply.get("timings") or {}).get("cache_n")
    return Reply([], rows, [], [int(entry["id"]) for entry in told], reply.get("tokens_evaluated"), cached)


# -- Ollama, TGI, chat -------------------------------------------------------------------------------------------------


def _ollama_body(request: Request) -> dict[str, Any]:
    asked = {"prompt": request.prompt, "raw": True, "stream": False, "logprobs": True, "top_logprobs": request.top}
    return _named(request) | asked | {"options": {"num_predict": request.generate, "temperature": 0}}


def _ollama_read(reply: Json, _request: Request) -> Reply:
    rows = [_entries(entry["top_logprobs"], "token") for entry in reply["logprobs"]]
    return Reply([], rows, [], [str(entry["token"]) for entry in reply["logprobs"]], reply.get("prompt_eval_count"))


def _tgi_body(request: Request) -> dict[str, Any]:
    asked = {"details": True, "max_new_tokens": request.generate, "top_n_tokens": request.top}
    return {"inputs": request.prompt, "parameters": asked}


def _tgi_read(reply: Json, _request: Request) -> Reply:
    rows = [_entries(entries, "id") for entries in reply["details"]["top_tokens"]]
    return Reply([], rows)


def _prefill_body(request: Request) -> dict[str, Any]:
    asked = {"details": True, "decoder_input_details": True, "max_new_tokens": request.generate}
    return {"inputs": request.prompt, "parameters": asked}


def _prefill_read(reply: Json, _request: Request) -> Reply:
    told = reply["details"]["prefill"]
    if not told:  # since 3.0 it is empty unless the server runs with --enable-prefill-logprobs
        raise ValueError("prefill")
    rows: list[Listed | None] = [
        None if entry["logprob"] is None else {int(entry["id"]): _value(entry["logprob"])} for entry in told
    ]
    rows_of_generated = [_entries([entry], "id") for entry in reply["details"].get("tokens") or ()]
    tokens: list[int | str] = [int(entry["id"]) for entry in told]
    return Reply(rows, rows_of_generated, tokens, [], len(told))


def _chat_body(request: Request) -> dict[str, Any]:
    asked = {"max_tokens": request.generate, "logprobs": True, "top_logprobs": request.top, "temperature": 0}
    return _named(request) | {"messages": [{"role": "user", "content": request.prompt}]} | asked


def _chat_read(reply: Json, _request: Request) -> Reply:
    choice = reply["choices"][0]
    rows = [_entries(entry["top_logprobs"], "token") for entry in choice["logprobs"]["content"]]
    return Reply([], rows, **_usage(reply))


DIALECTS: dict[str, Dialect] = {
    "openai": Dialect("/completions", _openai_body, _openai_read, whole=True, by_id=False, most=20),
    "vllm": Dialect("/completions", _vllm_body, _vllm_read, whole=True, by_id=True, most=20, switch="own"),
    "sglang": Dialect("/generate", _sglang_body, _sglang_read, whole=True, by_id=True, most=20, switch="own"),
    "llama-server": Dialect("/completion", _llama_body, _llama_read, whole=False, by_id=True, most=50, switch="off"),
    "ollama": Dialect("/api/generate", _ollama_body, _ollama_read, whole=False, by_id=False, most=20),
    "tgi": Dialect("/generate", _tgi_body, _tgi_read, whole=False, by_id=False, most=5),
    "tgi-prefill": Dialect("/generate", _prefill_body, _prefill_read, whole=True, by_id=False, most=1),
    "completions": Dialect("/completions", _completions_body, _completions_read, whole=False, by_id=False, most=20),
    "chat": Dialect("/chat/completions", _chat_body, _chat_read, whole=False, by_id=False, most=20, templated=True),
}


def apart(one: Listed, other: Listed) -> float:
    """Return how far two lists of log-probabilities are apart, in nats: sqrt(sum_k exp(max(a_k, b_k)) (a_k - b_k)^2).

    A token that one list does not have is at most as likely as the last one that it has, and counts as just as likely:
    the sum is then the least that it can be.

    Example:
        >>> round(apart({1: -0.5, 2: -1.0}, {1: -0.5, 2: -1.2}), 3), apart({1: -0.5}, {2: -0.5})
        (0.121, 0.0)
        >>> round(apart({1: -0.5, 2: -1.0}, {1: -0.5, 3: -3.0}), 3)
        1.213
    """
    least_one, least_other = min(one.values()), min(other.values())
    total = 0.0
    for token in one.keys() | other.keys():
        a, b = one.get(token, least_one), other.get(token, least_other)
        if token not in other:
            b = min(a, b)
        elif token not in one:
            a = min(a, b)
        if a != b:  # -inf - -inf is no difference
            total += math.exp(max(a, b)) * (a - b) ** 2
    return math.sqrt(total)

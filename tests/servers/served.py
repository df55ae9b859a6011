"""A server of the tests: a transformers model behind HTTP that speaks each kind as its documentation has it.

Its tokens are the 128 ASCII characters. A fault changes one thing that a law must find, or one that a client must say.
"""

from __future__ import annotations

import json
import math
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, BOS = 128, 1
WAIT = 0.05  # seconds for which a request waits for others
BLOCK = 16  # tokens of the prefix cache


class Letters:
    """A tokenizer whose ids are ASCII codes."""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]

    def decode(self, ids: Any) -> str:
        return "".join(map(chr, ids))

    def __len__(self) -> int:
        return VOCABULARY


def model(layers: int = 2, window: int | None = None, vocabulary: int = VOCABULARY) -> LlamaForCausalLM:
    """A small decoder whose large random weights make every token count."""
    torch.manual_seed(0)
    config = {
        "vocab_size": vocabulary, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "initializer_range": 0.4,
        "bos_token_id": BOS, "attn_implementation": "eager",
    }  # fmt: skip
    if window is not None:
        from transformers import MistralConfig, MistralForCausalLM

        return MistralForCausalLM(MistralConfig(**config, sliding_window=window)).eval()
    return LlamaForCausalLM(LlamaConfig(**config)).eval()


class Served:
    """The model with a queue, a prefix cache in name, and one fault."""

    def __init__(self, of: torch.nn.Module, fault: str = "", *, bos: int = 0, batches: bool = True) -> None:
        self.model, self.fault, self.bos, self.batches = of, fault, bos, batches
        self.seen: dict[Any, list[tuple[int, ...]]] = {}
        self.lock, self.queue_lock = threading.Lock(), threading.Lock()
        self.queue: list[dict[str, Any]] = []
        self.number = count(1)
        self.asked: list[dict[str, Any]] = []
        self.headers: list[Any] = []

    def ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return [BOS] * self.bos + [ord(letter) for letter in prompt]
        return [each for part in prompt for each in ([part] if isinstance(part, int) else self.ids(part))]

    def cached(self, ids: list[int], name: Any) -> int:
        """Tokens that the cache of that name holds, in whole blocks; None is no cache."""
        if name is None:
            return 0
        most = 0
        for earlier in self.seen.setdefault(name, []):
            shared = next((n for n, (a, b) in enumerate(zip(ids, earlier, strict=False)) if a != b), len(earlier))
            most = max(most, min(shared, len(ids) - 1) // BLOCK * BLOCK)
        self.seen[name].append(tuple(ids))
        return most

    def rows(self, ids: list[int], *, cached: int = 0, prompt: int | None = None) -> torch.Tensor:
        """Log-probabilities after each token, (L, V)."""
        entry = {"ids": ids, "cached": cached, "prompt": len(ids) if prompt is None else prompt}
        entry["done"] = threading.Event()
        if not self.batches:  # one by one
            with self.lock:
                self.run([entry])
            return entry["rows"]
        with self.queue_lock:
            self.queue.append(entry)
        time.sleep(WAIT)
        with self.lock:
            with self.queue_lock:
                batch, self.queue = self.queue, []
            if batch:
                self.run(batch)
        entry["done"].wait()
        return entry["rows"]

    def run(self, batch: list[dict[str, Any]]) -> None:
        longest = max(len(entry["ids"]) for entry in batch)
        uneven = any(len(entry["ids"]) != longest for entry in batch)
        left = uneven and self.fault == "lengths"
        inputs = torch.zeros(len(batch), longest, dtype=torch.long)
        places = torch.arange(longest).repeat(len(batch), 1)
        for row, entry in enumerate(batch):
            ids, cached = entry["ids"], entry["cached"]
            begin = longest - len(ids) if left else 0  # padded on the left, with no mask and no positions of its own
            inputs[row, begin : begin + len(ids)] = torch.tensor(ids)
            whole = cached == (entry["prompt"] - 1) // BLOCK * BLOCK
            if cached and (self.fault == "prefix_cache" or (self.fault == "chunks" and not whole)):
                places[row, cached:] -= cached  # positions begin anew behind what was cached
            if self.fault == "decoding":
                places[row, entry["prompt"] :] += 1
        with torch.no_grad():
            logits = self.model(input_ids=inputs, position_ids=places).logits.double()
        if self.fault == "batch" and len(batch) > 1:
            logits = logits + 0.1 * logits.roll(1, 0)
        for row, entry in enumerate(batch):
            begin = longest - len(entry["ids"]) if left else 0
            own = logits[row, begin : begin + len(entry["ids"])]
            if self.fault == "prefix":  # rotary tables made anew for each length, in effect
                own = own * (1 + len(entry["ids"]) / 300)
            if self.fault == "repeats":
                own = own * (1 + 0.2 * next(self.number))
            entry["rows"] = own.log_softmax(-1)
            entry["done"].set()

    def generated(self, ids: list[int], tokens: int, cached: int = 0) -> tuple[list[int], torch.Tensor]:
        """Greedy tokens, and the rows of prompt and tokens."""
        made: list[int] = []
        rows = self.rows(ids, cached=cached)
        for _ in range(tokens):
            made.append(int(rows[-1].argmax()))
            if len(made) < tokens:
                rows = self.rows([*ids, *made], cached=cached, prompt=len(ids))
        return made, rows

    # -- kinds ---------------------------------------------------------------------------------------------------------

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        name = path.rsplit("/", 1)[-1]
        if path.endswith("/api/generate"):
            return self.ollama(body)
        if path.endswith("/chat/completions"):
            return self.chat(body)
        if name == "completions":
            return self.vllm(body) if "prompt_logprobs" in body or "return_token_ids" in body else self.openai(body)
        if name == "completion":
            return self.llama(body)
        return self.sglang(body) if "sampling_params" in body else self.tgi(body)

    def listed(self, row: torch.Tensor, top: int, chosen: int | None = None) -> dict[int, float]:
        values, tokens = row.topk(min(top, len(row)))
        found = dict(zip(tokens.tolist(), values.tolist(), strict=True))
        if chosen is not None:
            found[chosen] = float(row[chosen])
        return found

    def openai(self, body: dict[str, Any]) -> Any:
        ids = self.ids(body["prompt"])
        cached = self.cached(ids, "all") if not body.get("echo") else 0
        made, rows = self.generated(ids, body["max_tokens"], cached)
        top = body["logprobs"]
        every = [*ids, *made]
        begin = 0 if body.get("echo") else len(ids)
        tops: list[Any] = []
        for place in range(begin, len(every)):
            source = rows[place - 1] if place else None
            if self.fault == "shifted" and body.get("echo"):  # llama-cpp-python without BOS
                source = rows[place] if 0 < place < len(ids) else None
            if self.fault == "shifted" and body.get("echo") and place == len(ids):
                break
            tops.append(source if source is None else self.text_keys(self.listed(source, top, every[place])))
        tokens = [chr(token) for token in every[begin : begin + len(tops)]]
        logprobs = {"tokens": tokens, "top_logprobs": tops, "token_logprobs": [], "text_offset": []}
        text = (body["prompt"] if body.get("echo") else "") + "".join(map(chr, made))
        choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": "length"}
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(made)}
        return {"object": "text_completion", "choices": [choice], "usage": usage}

    def text_keys(self, listed: dict[int, float]) -> dict[str, float]:
        return {chr(token): max(value, -9999.0) for token, value in listed.items()}

    def vllm(self, body: dict[str, Any]) -> Any:
        ids = self.ids(body["prompt"])
        echo = "prompt_logprobs" in body  # vLLM does not read its cache then
        cached = 0 if echo else self.cached(ids, body.get("cache_salt", "all"))
        made, rows = self.generated(ids, body["max_tokens"], cached)
        choice: dict[str, Any] = {"index": 0, "text": "".join(map(chr, made))}
        choice |= {"prompt_token_ids": ids, "token_ids": made}
        if echo:
            own = [self.listed(rows[place - 1], body["prompt_logprobs"], ids[place]) for place in range(1, len(ids))]
            choice["prompt_logprobs"] = [None] + [
                {str(token): {"logprob": value, "rank": 1, "decoded_token": chr(token)} for token, value in row.items()}
                for row in own
            ]
        tops = [self.listed(rows[len(ids) - 1 + n], body["logprobs"]) for n in range(len(made))]
        choice["logprobs"] = {
            "tokens": [f"token_id:{token}" for token in made],
            "top_logprobs": [{f"token_id:{token}": value for token, value in row.items()} for row in tops],
        }
        usage = {"prompt_tokens": len(ids), "prompt_tokens_details": {"cached_tokens": cached}}
        return {"choices": [choice], "usage": usage}

    def sglang(self, body: dict[str, Any]) -> Any:
        ids = self.ids(body["input_ids"] if "input_ids" in body else body["text"])
        echo = body["logprob_start_len"] == 0
        cached = 0 if echo else self.cached(ids, body.get("extra_key", "all"))
        made, rows = self.generated(ids, body["sampling_params"]["max_new_tokens"], cached)

        def entries(row: torch.Tensor) -> list[Any]:
            return [[value, token, None] for token, value in self.listed(row, body["top_logprobs_num"]).items()]

        told: dict[str, Any] = {"prompt_tokens": len(ids), "cached_tokens": cached}
        told["output_top_logprobs"] = [entries(rows[len(ids) - 1 + n]) for n in range(len(made))]
        told["output_token_logprobs"] = [[None, token, None] for token in made]
        told["input_top_logprobs"] = [None, *(entries(rows[n]) for n in range(len(ids) - 1))] if echo else []
        told["input_token_logprobs"] = [[None, token, None] for token in ids] if echo else []
        return {"text": "".join(map(chr, made)), "meta_info": told}

    def llama(self, body: dict[str, Any]) -> Any:
        ids = self.ids(body["prompt"])
        cached = self.cached(ids, "all" if body["cache_prompt"] else None)
        made, rows = self.generated(ids, body["n_predict"], cached)

        def entry(token: int, value: float) -> dict[str, Any]:
            return {"id": token, "token": chr(token), "bytes": [token], "logprob": value}

        told = []
        for number, token in enumerate(made):
            top = [entry(*pair) for pair in self.listed(rows[len(ids) - 1 + number], body["n_probs"]).items()]
            told.append(entry(token, top[0]["logprob"]) | {"top_logprobs": top})
        return {
            "content": "".join(map(chr, made)), "tokens": made, "completion_probabilities": told,
            "tokens_evaluated": len(ids), "tokens_cached": len(ids) + len(made) - 1, "timings": {"cache_n": cached},
        }  # fmt: skip

    def ollama(self, body: dict[str, Any]) -> Any:
        ids = self.ids(body["prompt"])
        made, rows = self.generated(ids, body["options"]["num_predict"])
        told = []
        for number, token in enumerate(made):
            top = self.listed(rows[len(ids) - 1 + number], body["top_logprobs"])
            entries = [{"token": chr(t), "logprob": value, "bytes": [t]} for t, value in top.items()]
            told.append({"token": chr(token), "logprob": top[token], "bytes": [token], "top_logprobs": entries})
        return {"response": "".join(map(chr, made)), "done": True, "prompt_eval_count": len(ids), "logprobs": told}

    def tgi(self, body: dict[str, Any]) -> Any:
        ids, asked = self.ids(body["inputs"]), body["parameters"]
        made, rows = self.generated(ids, asked["max_new_tokens"])

        def entry(token: int, value: float | None) -> dict[str, Any]:
            return {"id": token, "text": chr(token), "logprob": value}

        prefill = [entry(token, float(rows[n - 1, token]) if n else None) for n, token in enumerate(ids)]
        behind = [rows[len(ids) - 1 + n] for n in range(len(made))]
        details = {
            "prefill": prefill if asked.get("decoder_input_details") and self.fault != "no_prefill" else [],
            "tokens": [entry(t, float(row[t])) | {"special": False} for t, row in zip(made, behind, strict=True)],
            "top_tokens": [
                [entry(*pair) for pair in self.listed(row, min(asked.get("top_n_tokens", 0), 5)).items()]
                for row in behind
            ],
        }
        return [{"generated_text": "".join(map(chr, made)), "details": details}]

    def chat(self, body: dict[str, Any]) -> Any:
        ids = self.ids("user: " + body["messages"][0]["content"] + "\nassistant: ")
        made, rows = self.generated(ids, body["max_tokens"])
        content = []
        for number, token in enumerate(made):
            top = self.listed(rows[len(ids) - 1 + number], body["top_logprobs"])
            entries = [{"token": chr(t), "logprob": value, "bytes": [t]} for t, value in top.items()]
            content.append({"token": chr(token), "logprob": top[token], "bytes": [token], "top_logprobs": entries})
        message = {"role": "assistant", "content": "".join(map(chr, made))}
        return {
            "choices": [{"message": message, "logprobs": {"content": content}}],
            "usage": {"prompt_tokens": len(ids)},
        }


@contextmanager
def serving(served: Served, spoil: Any = None) -> Any:
    """Serve, and yield the address. `spoil` takes the handler and the reply; it returns another reply, or None if it
    answered by itself."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            served.asked.append(body)
            served.headers.append(dict(self.headers))
            reply = served.answer(self.path, body)
            if spoil is not None and (reply := spoil(self, reply)) is None:
                return
            self.send_json(200, reply)

        def send_json(self, status: int, reply: Any) -> None:
            content = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}"
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def changed(reply: Any, change: Any) -> Any:
    """Return a reply with every number of its log-probabilities changed."""
    if isinstance(reply, dict):
        return {
            key: change(value) if key == "logprob" or (isinstance(value, float) and not math.isnan(value)) else
            changed(value, change)
            for key, value in reply.items()
        }  # fmt: skip
    return [changed(part, change) for part in reply] if isinstance(reply, list) else reply

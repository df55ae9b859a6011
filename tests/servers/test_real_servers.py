"""Servers as they are shipped: llama-cpp-python's, with a right and a wrong GGUF, and the one of transformers."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from sqrtdk.answers import Server, check_server, diff_answers
from sqrtdk.audit.records import BROKEN, KEPT
from sqrtdk.errors import ModelError
from tests.servers.gguf_file import byte_letters, write_gguf
from tests.servers.served import BOS, model
from tests.support.program import called

pytestmark = pytest.mark.full
WITHIN_S = 120  # in which a server has to listen


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as a directory of transformers, with a tokenizer whose ids are bytes."""
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    to = tmp_path_factory.mktemp("served") / "hf"
    decoder = model(vocabulary=256)
    with torch.no_grad():  # it generates letters, which come back from text as the same tokens
        decoder.lm_head.weight[127:] = 0
        decoder.lm_head.weight[:32] = 0
    decoder.save_pretrained(to)
    vocabulary = {letter: byte for byte, letter in enumerate(byte_letters())}
    plain = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = tokenizers.decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=plain).save_pretrained(to)
    return to


def own_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@contextmanager
def running(log: Path, *command: str) -> Iterator[str]:
    """Run a server on a free port, wait until it listens, and yield the address of its API."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with log.open("w", encoding="utf-8") as written:
        process = subprocess.Popen([*command, "--port", str(port)], stdout=written, stderr=subprocess.STDOUT)
        try:
            begun = time.monotonic()
            while True:
                over = process.poll() is not None or time.monotonic() - begun > WITHIN_S
                assert not over, log.read_text(encoding="utf-8")[-2000:]
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                except OSError:
                    time.sleep(0.2)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()
            process.wait(60)


def llama(folder: Path, file: Path) -> Any:
    pytest.importorskip("llama_cpp.server.app")
    return running(
        folder.parent / "log", sys.executable, "-m", "llama_cpp.server", "--model", str(file), "--n_ctx", "1024",
        "--logits_all", "true", "--verbose", "false", "--n_threads", "1",
    )  # fmt: skip


@pytest.mark.parametrize("bos", [False, True])
def test_llama_cpp_pythons_rows_are_the_models_in_two_kinds(bos: bool, folder: Path, tmp_path: Path) -> None:
    decoder, letters = own_model(folder), tokenizer(folder)
    prompt = tuple(letters.encode("A scale is a small thing. It is one number in one line of one file"))
    file = write_gguf(tmp_path / "m.gguf", decoder, bos=bos)
    with torch.no_grad():
        logits = decoder(torch.tensor([[BOS] * bos + list(prompt)])).logits[0, bos:]
    own = logits.double().log_softmax(-1)
    with llama(folder, file) as url:
        for kind, rows in (("openai", len(prompt) if bos else len(prompt) - 1), ("completions", 8)):
            server = Server(url, kind=kind, tokenizer=letters, places=8)
            answers = server.ask([prompt])
            listed = answers.ids >= 0
            apart = (own[answers.position].gather(-1, answers.ids.clamp_min(0)) - answers.values)[listed].abs()
            assert len(answers) == rows
            assert float(apart.max()) < 0.1  # its cache is float16
            assert server.added == bos
            # without BOS, this version lists with each token what follows it
            assert server.shift == (kind == "openai" and not bos)
            assert server.requests == server.planned([prompt])


def test_llama_cpp_pythons_laws(folder: Path, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", own_model(folder))
    with llama(folder, file) as url:
        report = check_server(Server(url), characters=160)
        done = called("check", url, "--laws", "repeats,prefix", "--server-characters", "160")
    told = {answer.law: answer for answer in report.laws}
    assert [law for law, answer in told.items() if answer.state == BROKEN] == []
    assert {law for law in ("repeats", "prefix", "decoding", "reach") if told[law].state == KEPT} >= {
        "repeats",
        "prefix",
    }
    # it answers one by one, and does not tell what it read from its cache
    assert told["prefix_cache"].reason.id == "servers.laws.cache_untold"  # type: ignore[attr-defined]
    assert done.returncode == 0
    assert "repeats, prefix  kept" in done.stdout


@pytest.mark.parametrize("bos", [False, True])
def test_a_wrong_base_in_a_gguf_is_found_with_one_command(bos: bool, folder: Path, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", own_model(folder), bos=bos, base=500000.0)
    with llama(folder, file) as url:
        done = called("diff", str(folder), url, "--seq-len", "96", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 1
    assert report["verdict"] == "proven", report["paragraphs"]
    assert [(cause["name"], cause["b"]) for cause in report["causes"]] == [("rope_base", 500000.0)]
    assert report["requests"] == 5
    assert report["tokens"] < 600
    assert "5 requests of" in done.stderr


def test_a_right_gguf_is_no_fault(folder: Path, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", own_model(folder))
    with llama(folder, file) as url:
        report = diff_answers(own_model(folder), Server(url, tokenizer=tokenizer(folder)), [list(range(32, 112))] * 2)
    assert report.same
    assert report.causes == ()


def test_transformers_serve_gives_none(folder: Path) -> None:
    pytest.importorskip("openai")  # its server needs it
    serve = str(Path(sys.executable).parent / "transformers"), "serve", str(folder), "--host", "127.0.0.1"
    with running(folder.parent / "log", *serve, "--device", "cpu") as url:
        for kind in ("openai", "completions"):
            with pytest.raises(ModelError, match="gave no log-probabilities"):
                check_server(Server(url, model=str(folder), kind=kind), characters=64)

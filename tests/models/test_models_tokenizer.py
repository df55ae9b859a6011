"""A tokenizer runs in a process of its own: what it may take is limited, and how it ended is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers as hf
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from sqrtdk.errors import ModelError
from sqrtdk.models import tokenizer
from sqrtdk.models.load import resolve_model
from sqrtdk.models.options import LoadOptions
from sqrtdk.models.tokenizer import TokenizerError, tokenize
from tests.hf.families import FAMILIES

LETTERS = {"[UNK]": 0} | {chr(number): number for number in range(32, 127)}


def save(directory: Path, made: Tokenizer) -> None:
    hf.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]").save_pretrained(directory)


def by_letters() -> Tokenizer:
    made = Tokenizer(models.WordLevel(LETTERS, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return made


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    FAMILIES["llama"]().save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def long_text(tmp_path: Path) -> Path:
    """One word of 4 million letters: a search that starts at each of them takes hours."""
    path = tmp_path / "long.txt"
    path.write_text("abcdefgh" * 2**19, encoding="utf-8")
    return path


@pytest.mark.full
def test_ids_up_to_the_number_wanted_and_the_largest_of_all(llama: Path) -> None:
    save(llama, by_letters())
    tokens = tokenize(llama, "abcz", most=3)
    assert (tokens.head, tokens.body, tokens.tail, tokens.largest) == ([], [97, 98, 99], [], 122)


@pytest.mark.full
def test_one_that_takes_for_ever_is_cut_off(llama: Path, long_text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "TOKENIZER_SECONDS", 1)
    save(llama, Tokenizer(models.WordPiece(LETTERS, unk_token="[UNK]", max_input_chars_per_word=10**9)))
    with pytest.raises(ModelError, match=r"--text can't be used: .* \(it was stopped after 1 s\)"):
        resolve_model(str(llama), LoadOptions(static=True, text=long_text))
    monkeypatch.undo()
    assert tokenize(llama, "abc", most=3).largest == 0  # one word, which is not in the vocabulary


@pytest.mark.full
def test_one_that_takes_for_ever_to_load_is_cut_off(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The normalizer is run on an added token: a search that goes to its end from each of 4 million letters."""
    monkeypatch.setattr(tokenizer, "TOKENIZER_SECONDS", 1)
    made = by_letters()
    made.normalizer = normalizers.Replace(Regex("a*[bc](?<!b)"), "")
    save(llama, made)
    stored = json.loads((llama / "tokenizer.json").read_text())
    stored["added_tokens"] = [
        {"id": 200, "content": "a" * 2**22 + "b", "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": True, "special": False}
    ]  # fmt: skip
    (llama / "tokenizer.json").write_text(json.dumps(stored))
    notes = resolve_model(str(llama), LoadOptions(static=True)).notes
    assert "the ids are random, with seed 0: the tokenizer can't be used (it was stopped after 1 s)" in notes


@pytest.mark.full
def test_one_that_takes_all_memory_ends_its_own_process_only(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "TOKENIZER_BYTES", 2**31)
    made = by_letters()
    made.normalizer = normalizers.Sequence([normalizers.Replace("e", "e" * 2**12)] * 3)
    save(llama, made)
    with pytest.raises(TokenizerError, match=r"its process ended with -\d+; it may take 2 GiB|MemoryError"):
        tokenize(llama, "e" * 2**10, most=3)


@pytest.mark.full
def test_what_it_raises_is_the_reason(llama: Path) -> None:
    (llama / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"^\w+: \w"):
        tokenize(llama, "abc", most=3)


def test_a_process_that_cannot_start_is_the_reason(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", str(llama / "no-python"))
    with pytest.raises(TokenizerError, match=r"no process for it: .*No such file"):
        tokenize(llama, "abc", most=3)


def test_the_option_of_older_pythons_serves_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, by_letters())
    expected = tokenize(tmp_path, "ab", most=4)
    monkeypatch.setattr(tokenizer, "_OWN_FOLDER_OFF", "-I")
    assert tokenize(tmp_path, "ab", most=4) == expected

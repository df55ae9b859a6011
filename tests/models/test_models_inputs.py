"""Inputs of the right kind, from text, from a file, or guessed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn

from sqrtdk.errors import InvalidValueError, ModelError
from sqrtdk.models.demo import load_demo
from sqrtdk.models.inputs import guess_inputs, make_inputs
from sqrtdk.models.load import resolve_model
from sqrtdk.models.options import LoadOptions
from sqrtdk.models.run import call
from sqrtdk.models.tokens import embedded_text, random_ids
from tests.hf import small as transformers_small
from tests.hf.families import BERT, FAMILIES, LLAMA


def build(config: Any) -> Any:
    with torch.device("meta"):
        return hf.AutoModel.from_config(config)


@pytest.fixture
def llama(tmp_path: Path) -> str:
    path = tmp_path / "llama"
    FAMILIES["llama"]().save_pretrained(path)
    return str(path)


def add_tokenizer(directory: str, *, size: int = 159) -> None:
    """A word for every character below 160; `[CLS]` 1 before and `[SEP]` 2 behind."""
    vocab = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2} | {chr(i): i for i in range(3, size + 1)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    fast = hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    fast.save_pretrained(directory)


def test_the_embedded_text_is_english_and_chinese() -> None:
    text = embedded_text()
    assert 35 <= len(text.splitlines()) <= 60
    assert sum("一" <= c <= "鿿" for c in text) > 50


@pytest.mark.full
def test_ids_come_from_the_models_own_tokenizer(llama: str) -> None:
    add_tokenizer(llama)
    loaded = resolve_model(llama, LoadOptions(batch=2, seq_len=20))
    ids = loaded.inputs["input_ids"]
    assert ids[:, 0].tolist() == [1, 1]
    assert ids[:, -1].tolist() == [2, 2]
    words = "".join(chr(i) for row in ids for i in row[1:-1].tolist())
    assert words == embedded_text()[:36]
    assert not any("ids are random" in note for note in loaded.notes)


def test_a_text_file_goes_through_the_tokenizer(llama: str, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("xyz", encoding="utf-8")
    with pytest.raises(ModelError, match="--text can't be used: there is no tokenizer"):
        resolve_model(llama, LoadOptions(text=file))
    add_tokenizer(llama)
    assert resolve_model(llama, LoadOptions(text=file, seq_len=7)).inputs["input_ids"].tolist() == [
        [1, *(ord(c) for c in "xyzxy"), 2],
    ]
    file.write_text(" \n", encoding="utf-8")
    with pytest.raises(ModelError, match="is empty"):
        resolve_model(llama, LoadOptions(text=file))
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ModelError, match="not UTF-8"):
        resolve_model(llama, LoadOptions(text=file))


@pytest.mark.parametrize("broken", ["{", pytest.param('{"model": 3}', marks=pytest.mark.full)])
def test_a_broken_tokenizer_gives_random_ids_and_a_note(llama: str, broken: str) -> None:
    Path(llama, "tokenizer.json").write_text(broken, encoding="utf-8")
    loaded = resolve_model(llama)
    assert any("ids are random" in n and "the tokenizer can't be used" in n for n in loaded.notes)


@pytest.mark.full
def test_a_tokenizer_of_another_model_gives_random_ids_and_a_note(llama: str) -> None:
    add_tokenizer(llama, size=1000)
    Path(llama, "t.txt").write_text("é" + chr(900), encoding="utf-8")
    with pytest.raises(ModelError, match="gives ids up to 900, and the model has 160"):
        resolve_model(llama, LoadOptions(text=Path(llama, "t.txt")))


def test_random_ids_avoid_what_the_config_calls_special() -> None:
    config = hf.LlamaConfig(**(LLAMA | {"vocab_size": 8, "eos_token_id": [5, 6]}))
    ids = random_ids(config, batch=4, length=100, vocab=8, seed=0)
    assert set(ids.flatten().tolist()) == {2, 3, 4, 7}
    assert torch.equal(ids, random_ids(config, batch=4, length=100, vocab=8, seed=0))
    assert not torch.equal(ids, random_ids(config, batch=4, length=100, vocab=8, seed=1))


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("llama", {"input_ids": (2, 9), "attention_mask": (2, 9)}),
        ("bert", {"input_ids": (2, 9), "attention_mask": (2, 9)}),
        ("t5", {"input_ids": (2, 9), "attention_mask": (2, 9), "decoder_input_ids": (2, 9)}),
        ("whisper", {"input_features": (2, 8, 48), "decoder_input_ids": (2, 9)}),
        ("vit", {"pixel_values": (2, 3, 32, 32)}),
        ("clip", {"input_ids": (2, 9), "pixel_values": (2, 3, 32, 32), "attention_mask": (2, 9)}),
        ("detr", {"pixel_values": (2, 3, 224, 224), "pixel_mask": (2, 224, 224)}),
    ],
)
def test_kinds_and_shapes(tmp_path: Path, name: str, wanted: dict[str, tuple[int, ...]]) -> None:
    FAMILIES[name]().save_pretrained(tmp_path)
    loaded = resolve_model(str(tmp_path), LoadOptions(batch=2, seq_len=9))
    assert {key: tuple(value.shape) for key, value in loaded.inputs.items()} == wanted
    if "decoder_input_ids" in loaded.inputs and "input_ids" in loaded.inputs:
        assert not torch.equal(loaded.inputs["decoder_input_ids"], loaded.inputs["input_ids"])
    static = resolve_model(str(tmp_path), LoadOptions(batch=2, seq_len=9, static=True))
    assert set(static.inputs) == {key for key in wanted if not key.endswith("_mask")}


TOWER = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
OTHERS = {
    "wav2vec2": lambda: hf.Wav2Vec2Config(
        **TOWER, conv_dim=(8, 8), conv_stride=(5, 2), conv_kernel=(10, 3), num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, vocab_size=20,
    ),
    "audio-spectrogram-transformer": lambda: hf.ASTConfig(**TOWER, max_length=64, num_mel_bins=32),
    "videomae": lambda: hf.VideoMAEConfig(**TOWER, image_size=16, patch_size=8, num_frames=4),
    "speech_to_text": lambda: hf.Speech2TextConfig(
        d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=32, decoder_ffn_dim=32, conv_channels=16, input_feat_per_channel=8, max_source_positions=300,
        vocab_size=40,
    ),
    "siglip": lambda: hf.SiglipConfig(
        text_config=TOWER | {"vocab_size": 40, "max_position_embeddings": 16},
        vision_config=TOWER | {"image_size": 16, "patch_size": 8},
    ),
    "longt5-like position free": lambda: hf.MT5Config(
        vocab_size=40, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0
    ),
    "beit with two image sizes": lambda: hf.BeitConfig(**TOWER, image_size=16, patch_size=8, vocab_size=40),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_families_beyond_the_table_run(tmp_path: Path, name: str) -> None:
    OTHERS[name]().save_pretrained(tmp_path)
    loaded = resolve_model(str(tmp_path))
    call(loaded.module, loaded.inputs)


def test_a_language_model_with_an_image_tower_gets_text_and_a_note(tmp_path: Path) -> None:
    config = hf.Gemma3Config(
        text_config=FAMILIES["gemma3"]().to_dict(),
        vision_config=TOWER | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=150,
        architectures=["Gemma3ForConditionalGeneration"],
    )
    config.save_pretrained(tmp_path)
    loaded = resolve_model(str(tmp_path), LoadOptions(seq_len=9))
    assert "pixel_values" not in loaded.inputs
    assert any(note.startswith("no pixel_values") for note in loaded.notes)
    assert 150 not in loaded.inputs["input_ids"]
    call(loaded.module, loaded.inputs)


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (lambda: FAMILIES["gpt2"](), 128),
        (lambda: FAMILIES["clip"](), 24),
        (lambda: FAMILIES["whisper"](), 48),
        (lambda: hf.RobertaConfig(**(BERT | {"pad_token_id": 1})), 126),
    ],
)
def test_the_length_is_cut_to_the_positions(config: Any, limit: int, tmp_path: Path) -> None:
    config().save_pretrained(tmp_path)
    loaded = resolve_model(str(tmp_path), LoadOptions(seq_len=1000))
    ids = loaded.inputs.get("decoder_input_ids", loaded.inputs.get("input_ids"))
    assert ids.shape[1] == limit
    assert f"seq_len 1000 was cut to {limit}: the model has no more positions" in loaded.notes
    call(loaded.module, loaded.inputs)
    assert not any("was cut" in note for note in resolve_model(str(tmp_path)).notes)


def test_a_model_whose_inputs_cannot_be_made_says_so() -> None:
    class Odd(nn.Module):
        def forward(self, graph: torch.Tensor, input_ids: torch.Tensor) -> None: ...

    with pytest.raises(ModelError, match="Odd wants graph that can't be made here") as caught:
        make_inputs(Odd(), FAMILIES["llama"]())
    assert "forward(graph, input_ids)" in caught.value.hint
    with pytest.raises(ModelError, match="names no vocab_size"):
        make_inputs(Odd(), FAMILIES["vit"]())


def test_guess_inputs_for_modules_of_the_python_api() -> None:
    inputs, _ = guess_inputs(build(FAMILIES["llama"]()), seq_len=6)
    assert isinstance(inputs, dict)
    assert inputs["input_ids"].shape == (1, 6)
    assert inputs["input_ids"].is_meta
    inputs, _ = guess_inputs(load_demo(), seq_len=6)
    assert isinstance(inputs, dict)
    assert bytes(inputs["input_ids"][0].tolist()).decode() == embedded_text()[:6]
    with pytest.raises(InvalidValueError, match="no inputs were given, and Transformer has no config") as caught:
        guess_inputs(nn.Transformer(8, 2, 1, 1, 8, batch_first=True))
    assert "forward(src, tgt" in caught.value.hint


IDS = torch.randint(3, 150, (2, 5))


@pytest.mark.parametrize(
    ("tensors", "message", "hint"),
    [
        ({"ids": IDS}, "takes no input named 'ids'", "forward takes: input_ids, attention_mask"),
        ({"input_ids": IDS, "<script>": IDS}, "takes no input named '<script>'", "forward takes"),
        ({"attention_mask": torch.ones(2, 5)}, "lack input_ids", "forward takes"),
        ({"input_ids": IDS[0]}, r"shape \(5,\); 2 dimensions", "batch"),
        ({"input_ids": IDS[:, :0]}, "is empty", "at least one"),
        ({"input_ids": IDS.float()}, "ids are int64 or int32", "integers"),
        ({"input_ids": IDS + 1000}, "the model knows 0 to 159", "tokenizer"),
        ({"input_ids": IDS - 1000}, "the model knows 0 to 159", "tokenizer"),
    ],
)
def test_an_input_file_that_does_not_fit_is_refused(
    llama: str, tmp_path: Path, tensors: dict[str, torch.Tensor], message: str, hint: str
) -> None:
    file = tmp_path / "x.safetensors"
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, file)
    with pytest.raises(ModelError, match=message) as caught:
        resolve_model(llama, LoadOptions(input_file=file))
    assert hint in caught.value.hint


def test_an_input_file_is_used_as_it_is(llama: str, tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    save_file({"input_ids": IDS}, file)
    assert torch.equal(resolve_model(llama, LoadOptions(input_file=file)).inputs["input_ids"], IDS)
    save_file({"inputs_embeds": torch.randn(2, 5, 64)}, file)
    loaded = resolve_model(llama, LoadOptions(input_file=file, dtype="bfloat16"))
    assert loaded.inputs["inputs_embeds"].dtype == torch.bfloat16
    call(loaded.module, loaded.inputs)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.pt", b"", "not a .safetensors file"),
        ("x.safetensors", b"junk", "not valid safetensors"),
        ("x.safetensors", b"", "not valid safetensors"),
        ("absent.safetensors", None, "can't read the inputs"),
    ],
)
def test_a_file_that_holds_no_inputs_is_refused(
    llama: str, tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        resolve_model(llama, LoadOptions(input_file=tmp_path / name))
    assert caught.value.hint


def test_inputs_of_a_wrong_shape_are_a_clear_error_when_run(tmp_path: Path) -> None:
    FAMILIES["vit"]().save_pretrained(tmp_path)
    save_file({"pixel_values": torch.randn(1, 3, 40, 40)}, tmp_path.parent / "p.safetensors")
    loaded = resolve_model(str(tmp_path), LoadOptions(input_file=tmp_path.parent / "p.safetensors"))
    with pytest.raises(ModelError, match="ViTForImageClassification raised ValueError") as caught:
        call(loaded.module, loaded.inputs)
    assert "pixel_values (1, 3, 40, 40)" in caught.value.hint


@pytest.mark.parametrize("size", ["large", 0.5, {"height": 8}, [8], ["a", "b"], {}])
def test_a_size_of_an_odd_kind_is_an_error_of_the_config(size: object) -> None:
    with torch.device("meta"):
        module = hf.ViTModel(hf.ViTConfig(num_hidden_layers=1))
    config = hf.ViTConfig(num_hidden_layers=1)
    config.__dict__["image_size"] = size
    with pytest.raises(ModelError, match="no pixel_values can be made from this config") as caught:
        make_inputs(module, config)
    assert "--input FILE.safetensors" in caught.value.hint


def test_a_window_that_differs_from_layer_to_layer_says_nothing_of_the_length() -> None:
    # NeoMME's config raises where it is asked for one number for all layers
    transformers_small.needs("neomme")
    module = transformers_small.build(transformers_small.small_config("neomme"), "eager")
    with pytest.raises(Exception, match="per-layer"):
        _ = module.config.sliding_window
    made, _ = make_inputs(module, module.config, batch=1, seed=0)
    assert made["input_ids"].shape == (1, 128)


@pytest.mark.full
def test_a_text_of_unknown_tokens_is_told(llama: str, tmp_path: Path) -> None:
    """A vocabulary of other characters than the text's, as of molecules: its figures are those of one token."""
    add_tokenizer(llama)
    text = tmp_path / "text.txt"
    note = "the tokens of the text are {} [UNK]: give --text of the model's own kind"
    for written, share in (("Д" * 99 + "a", "99%"), ("Д" * 30 + "a" * 70, "30%"), ("Д" * 10 + "a" * 90, None)):
        text.write_text(written, encoding="utf-8")
        notes = resolve_model(llama, LoadOptions(text=text, seq_len=100)).notes
        told = [entry for entry in notes if "[UNK]" in entry]
        assert told == ([note.format(share)] if share else [])


@pytest.mark.parametrize("name", ["vit", "whisper"])
def test_made_up_numbers_are_told(name: str) -> None:
    config = FAMILIES[name]()
    made, notes = make_inputs(build(config), config, seed=3)
    told = next(key for key in made if key in ("pixel_values", "input_features"))
    assert f"{told} are made up, random numbers with seed 3: give --input for real figures" in notes
    assert ("decoder_input_ids" in made) == any(note.startswith("the ids are random, with seed 3") for note in notes)

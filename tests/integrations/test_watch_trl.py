"""TRL's trainers on a small random model, watched by the callback of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from sqrtdk.integrations.trainer import AttentionWatch
from tests.integrations.sinks_read import needs

TEXTS = ["a b c d e", "b c d e f a", "c d a", "d e f a b c a b"] * 4


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *"abcdef"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def _model() -> GPT2LMHeadModel:
    torch.manual_seed(3)
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    return GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=16, n_embd=16, n_layer=2, n_head=2, **tokens))


def _trainer(method: str, folder: Path, *callbacks: Any) -> Any:
    trl, datasets = needs("trl"), needs("datasets")
    own: dict[str, Any] = {"SFT": {"max_length": 16}, "DPO": {"max_length": 16}, "GRPO": {"num_generations": 2}}[method]
    if method == "GRPO":
        own["max_completion_length"] = 6
    arguments = getattr(trl, f"{method}Config")(
        str(folder),
        max_steps=5,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        **own,
    )
    columns = {"SFT": ["text"], "DPO": ["prompt", "chosen", "rejected"], "GRPO": ["prompt"]}[method]
    rows = datasets.Dataset.from_dict({name: TEXTS[at:] + TEXTS[:at] for at, name in enumerate(columns)})
    more: dict[str, Any] = {"SFT": {}, "DPO": {"ref_model": _model()}, "GRPO": {"reward_funcs": _lengths}}[method]
    data = {"train_dataset": rows, "processing_class": _tokenizer(), **more}
    return getattr(trl, f"{method}Trainer")(_model(), args=arguments, callbacks=list(callbacks), **data)


def _lengths(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text) % 5) for text in completions]


def _train(method: str, folder: Path, *callbacks: Any) -> list[float]:
    trainer = _trainer(method, folder, *callbacks)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("method", ["SFT", "DPO", "GRPO"])
def test_a_trainer_is_watched(method: str, tmp_path: Path) -> None:
    callback = AttentionWatch(every=2)
    watched = _train(method, tmp_path, callback)
    assert watched == _train(method, tmp_path)
    assert len(watched) == 5
    assert [sample.step for sample in callback.watch.samples] == [1, 2, 4]
    assert [sample.loss for sample in callback.watch.samples] == [watched[step - 1] for step in (1, 2, 4)]
    for sample in callback.watch.samples:
        assert [call.site for call in sample.calls] == ["transformer.h.0.attn", "transformer.h.1.attn"]
        assert all(call.columns["rows"][0] > 0 for call in sample.calls)
        assert all(max(call.columns["query_grad_max"]) > 0 for call in sample.calls)

"""Watch a model that the Trainer of transformers trains, and clip its q and k by what was measured.

python examples/watch_trainer.py
"""

from __future__ import annotations

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from sqrtdk.integrations.trainer import AttentionWatch, QKClip


def main() -> None:
    torch.manual_seed(0)
    small = {"vocab_size": 32, "bos_token_id": 0, "eos_token_id": 0, "n_positions": 16}
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, **small))
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(32, (32, 16))]
    with tempfile.TemporaryDirectory() as folder:
        watch = AttentionWatch(every=2, to=f"{folder}/run")
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=8,
            logging_steps=1,
            per_device_train_batch_size=4,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
        )
        callbacks = [watch, QKClip(watch, threshold=100.0)]
        Trainer(model, arguments, train_dataset=rows, callbacks=callbacks).train()
        for sample in watch.watch.samples:
            largest = max(max(call.columns["max_logit"]) for call in sample.calls)
            print(f"step {sample.step}: {len(sample.calls)} attentions, largest logit {largest:.3f}")


if __name__ == "__main__":
    main()

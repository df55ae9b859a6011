"""Train the model that the tests of `sqrtdk.answers` change: a small Gemma 2 of bytes, on Python's standard library.

    python scripts/train_answers.py

Gemma 2 has what most mistakes need: windows on every second layer, two softcaps, a scale of its own, norms with
"1 + weight", a factor on the embeddings. Writes `config.json` and `model.safetensors` (bfloat16, 0.8 MB) into
`tests/answers/gemma`. Takes some minutes on one core.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from sqrtdk_lab.training.settings import batch, stdlib_text

TARGET = Path(__file__).parents[1] / "tests" / "answers" / "gemma"
STEPS, ROWS, LENGTH, RATE = 400, 8, 160, 2e-3
CONFIG = Gemma2Config(
    vocab_size=256, hidden_size=96, intermediate_size=192, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, sliding_window=32, query_pre_attn_scalar=24, max_position_embeddings=512,
    attn_logit_softcapping=20.0, final_logit_softcapping=30.0, hidden_activation="gelu_pytorch_tanh", bos_token_id=1,
    eos_token_id=2, pad_token_id=0,
)  # fmt: skip


def main() -> None:
    """Train, print losses in nats a byte, write."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    CONFIG._attn_implementation = "eager"
    model = Gemma2ForCausalLM(CONFIG).train()
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    order = torch.Generator().manual_seed(0)
    text, _ = stdlib_text()
    for step in range(STEPS):
        ids, targets = batch(text, ROWS, LENGTH, order)
        loss = torch.nn.functional.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(step, round(loss.item(), 3), flush=True)
    model.to(torch.bfloat16).save_pretrained(TARGET)


if __name__ == "__main__":
    main()

"""Watch a module that Lightning trains; needs `pip install 'sqrtdk[lightning]'`.

python examples/watch_lightning.py
"""

from __future__ import annotations

import lightning
import torch
from torch import Tensor, nn

from sqrtdk.integrations.lightning import AttentionWatch


class Task(lightning.LightningModule):
    """One transformer layer that learns to give back its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return (self(batch) - batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    torch.manual_seed(0)
    loader = torch.utils.data.DataLoader(torch.randn(32, 12, 32), batch_size=4)
    watch = AttentionWatch(every=2)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        callbacks=[watch],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Task(), loader)
    for sample in watch.watch.samples:
        largest = max(max(call.columns["max_logit"]) for call in sample.calls)
        print(f"step {sample.step}: loss {sample.loss:.3f}, largest logit {largest:.3f}")


if __name__ == "__main__":
    main()

"""A Trainer of Lightning that is watched: its losses, its steps, its validations, its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sqrtdk.errors import InvalidValueError, MissingExtraError
from sqrtdk.integrations import lightning as integration
from sqrtdk.integrations.lightning import AttentionWatch, called_module
from sqrtdk.monitor.reading import read_run
from tests.integrations.sinks_read import needs

ROWS, LENGTH = 4, 5
# Not in the default environment; Lightning warns of workers and of log directories.
needed = pytest.mark.filterwarnings("default")


def _module(own_forward: bool) -> Any:
    lightning = needs("lightning.pytorch")

    class Task(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
            self.losses: list[float] = []

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            loss = (self if own_forward else self.net)(batch).square().mean()
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: Tensor, index: int) -> None:
            self.net(batch)
            self(batch) if own_forward else None

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    if own_forward:
        Task.forward = lambda self, batch: self.net(batch)
    torch.manual_seed(4)
    return Task()


def _fit(module: Any, folder: Path, *callbacks: Any, checkpoint: str | None = None, **options: Any) -> Any:
    lightning = needs("lightning.pytorch")
    torch.manual_seed(6)
    rows = [torch.utils.data.DataLoader(torch.randn(count * ROWS, LENGTH, 16), batch_size=ROWS) for count in (10, 2)]
    plain: dict[str, Any] = {"max_epochs": 1, "enable_checkpointing": False, "val_check_interval": 2}
    trainer = lightning.Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        accumulate_grad_batches=2,
        **(plain | options),
    )
    trainer.fit(module, *rows, ckpt_path=checkpoint)
    return trainer


@needed
@pytest.mark.slow
@pytest.mark.parametrize("own_forward", [False, True])
def test_a_step_is_one_of_the_optimizer(own_forward: bool, tmp_path: Path) -> None:
    """Ten batches by twos are five steps; the validations in between are not among their rows."""
    plain, watched, callback = _module(own_forward), _module(own_forward), AttentionWatch(every=1)
    _fit(plain, tmp_path)
    trainer = _fit(watched, tmp_path, callback)
    assert watched.losses == plain.losses
    for name, weight in plain.state_dict().items():
        assert torch.equal(weight, watched.state_dict()[name]), name
    samples = callback.watch.samples
    assert [sample.step for sample in samples] == [1, 2, 3, 4, 5]
    assert trainer.global_step == 5
    halves = (torch.tensor(watched.losses) / 2).view(-1, 2)
    assert [sample.loss for sample in samples] == (halves[:, 0] + halves[:, 1]).tolist()
    assert {sample.learning_rate for sample in samples} == {0.1}
    for sample in samples:
        (call,) = sample.calls
        assert call.site == ("net.self_attn" if own_forward else "self_attn")
        assert list(call.columns["rows"]) == [2 * ROWS * LENGTH] * 2


@needed
@pytest.mark.slow
def test_a_run_that_is_resumed_goes_on_at_its_checkpoint(tmp_path: Path) -> None:
    module = _module(True)
    _fit(module, tmp_path, AttentionWatch(every=2, to=tmp_path / "run")).save_checkpoint(tmp_path / "a.ckpt")
    again = AttentionWatch(every=2, to=tmp_path / "run")
    _fit(module, tmp_path, again, checkpoint=str(tmp_path / "a.ckpt"), max_epochs=2)
    run = read_run(tmp_path / "run")
    assert run.steps["step"].to_pylist() == list(range(1, 11))
    assert sorted(set(run.heads["step"].to_pylist())) == [1, 2, 4, 6, 8, 10]


@needed
@pytest.mark.slow
def test_a_training_that_raises_ends_the_watch(tmp_path: Path) -> None:
    module = _module(True)
    module.on_train_batch_end = lambda *_: 1 / 0
    callback = AttentionWatch(every=1, to=tmp_path / "run")
    with pytest.raises(ZeroDivisionError):
        _fit(module, tmp_path, callback)
    assert callback.watch.alarms == []
    _fit(_module(True), tmp_path, callback)
    assert len(read_run(tmp_path / "run").steps) == 5


def test_without_lightning_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integration, "_package", None)
    with pytest.raises(MissingExtraError, match="lightning is not installed"):
        AttentionWatch()


def test_the_module_that_is_called() -> None:
    task = nn.Module()
    with pytest.raises(InvalidValueError, match="0 children with parameters"):
        called_module(task, None)
    task.net, task.metric = nn.Sequential(nn.Linear(2, 2)), nn.Identity()
    assert called_module(task, None) is task.net
    assert called_module(task, "net.0") is task.net[0]
    assert called_module(task.net, None) is task.net
    with pytest.raises(InvalidValueError, match="no module 'nett'"):
        called_module(task, "nett")
    task.head = nn.Linear(2, 2)
    with pytest.raises(InvalidValueError, match="2 children with parameters: net, head"):
        called_module(task, None)


@needed
@pytest.mark.slow
def test_the_records_up_to_a_checkpoint_are_written_when_it_is_saved(tmp_path: Path) -> None:
    lightning = needs("lightning.pytorch")
    there: list[tuple[int, list[int]]] = []

    class Look(lightning.Callback):  # type: ignore[misc,name-defined]
        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
            there.append((trainer.global_step, read_run(tmp_path / "run").steps["step"].to_pylist()))

    saves = lightning.callbacks.ModelCheckpoint(tmp_path / "saved", every_n_train_steps=2, save_top_k=-1)
    watch = AttentionWatch(every=1, to=tmp_path / "run")
    trainer = _fit(_module(False), tmp_path, watch, Look(), saves, enable_checkpointing=True)
    assert there
    assert all(steps == list(range(1, last + 1)) for last, steps in there)
    trainer.save_checkpoint(tmp_path / "after.ckpt")  # the watch is over
    assert read_run(tmp_path / "run").damaged == ()

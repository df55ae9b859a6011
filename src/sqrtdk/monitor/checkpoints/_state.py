"""What a Trainer noted beside a checkpoint: its step, and the losses that it logged. The file is a stranger's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sqrtdk.errors import ModelError, short_text
from sqrtdk.models.config import read_json

TRAINER_STATE = "trainer_state.json"
MAX_STATE_BYTES = 100 * 2**20


def global_step(directory: Path) -> int | None:
    """The step that trainer_state.json tells; None where it tells none.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, TRAINER_STATE).write_text('{"global_step": 500}')
        ...     global_step(Path(folder)), global_step(Path(folder, "nowhere"))
        (500, None)
    """
    try:
        step = read_json(directory / TRAINER_STATE, MAX_STATE_BYTES).get("global_step")
    except (OSError, ModelError):
        return None
    return step if type(step) is int else None


def loss_at(directory: Path, step: int) -> tuple[float | None, str]:
    """The last loss that was logged up to a step, and what is wrong with the file that tells it; "": nothing."""
    try:
        history = read_json(directory / TRAINER_STATE, MAX_STATE_BYTES).get("log_history")
    except FileNotFoundError:
        return None, ""
    except (OSError, ModelError) as error:
        return None, short_text(error, 200)
    if not isinstance(history, list):
        return None, f"{TRAINER_STATE} has no list log_history"
    losses = [(entry["step"], float(entry["loss"])) for entry in history if _is_loss(entry) and entry["step"] <= step]
    return max(losses, key=lambda one: one[0], default=(0, None))[1], ""


def _is_loss(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and type(entry.get("step")) is int
        and (type(entry.get("loss")) is float or (type(entry.get("loss")) is int and abs(entry["loss"]) < 2**53))
    )

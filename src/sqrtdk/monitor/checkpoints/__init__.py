"""Audits of saved checkpoints as a watched run: the findings of `check` on each, as records of one training run."""

from sqrtdk.monitor.checkpoints._series import CheckpointSeries as CheckpointSeries
from sqrtdk.monitor.checkpoints._series import measure_checkpoints as measure_checkpoints

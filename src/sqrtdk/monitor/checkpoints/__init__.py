"""A watch after the fact: what `check` finds in each checkpoint of a training run, as the records of a watched run."""

from sqrtdk.monitor.checkpoints._series import Series as Series
from sqrtdk.monitor.checkpoints._series import measure_checkpoints as measure_checkpoints

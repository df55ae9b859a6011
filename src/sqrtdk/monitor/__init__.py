"""The watch over a training run: measurements at sampled steps, alarms, and the folder of records.

`watch.watch` is the entry point. `folder.RunWriter` writes a run's records, `reading.read_run` and `reading.follow`
read them, and `columns` lists their columns. Nothing is imported here, so that reading a run needs no torch.
"""

from sqrtdk._leads import says_if_called as _says_if_called

_says_if_called(__name__)

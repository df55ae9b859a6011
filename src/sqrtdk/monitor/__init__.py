"""The watch over a training run: what it measures at sampled steps, what it warns of, and the folder of its records.

`watch.watch` is the way in; `folder.RunWriter` writes a run's records, `reading.read_run` and `reading.follow` read
them, and `columns` lists them. Nothing is imported here: reading a run needs no torch.
"""

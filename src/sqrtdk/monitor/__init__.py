"""The watch over a training run: what it records, and the folder that holds it.

`folder.RunWriter` writes a run's records, `reading.read_run` and `reading.follow` read them; `columns` lists them.
"""

"""Small real models, trained: one function of a cell, `train.train`."""

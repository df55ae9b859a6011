"""Training of small real models: one function of a cell, `train.train`."""

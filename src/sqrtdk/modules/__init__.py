"""What the modules of a model take and give in a run: their calls, and the tensors in what they pass on."""

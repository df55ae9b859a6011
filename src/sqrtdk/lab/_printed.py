"""Five scaled logits that an explanation prints, with the weights that it gives them."""

LOGITS = (-3.0, -1.0, 0.0, 1.0, 3.0)
WEIGHTS = (0.012, 0.089, 0.243, 0.661, 0.995)

"""The lab: every claim about sqrt(d_k) is an experiment with a control, an interval and a verdict."""

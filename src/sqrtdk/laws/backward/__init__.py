"""FormulaGradients of an attention: those of its formula, those that autograd gives, and a name for what differs."""

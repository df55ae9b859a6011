"""Shows the comparison of two models: terminal, HTML and JSON."""

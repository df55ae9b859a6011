"""Shows one run or several, or the comparison of two: terminal, HTML and JSON."""

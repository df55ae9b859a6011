"""The comparison with a side that answers: terminal, JSON, page."""

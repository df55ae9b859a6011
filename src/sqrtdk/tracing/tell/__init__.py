"""Telling: what a reading means, in the words and numbers of a record."""

"""Turns readings into the words and numbers of records."""

"""Probes: find out what a part of the tape does by running it again on other values."""

"""Probes: what a part of the tape does, decided by running it again on other values."""

"""Classifying: what the output of an operation is to the lineage."""

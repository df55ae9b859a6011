"""The scripts of benchmarks/ import one another as a script does: by their names alone."""

"""Compares the gradients of two models."""

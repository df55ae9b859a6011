"""Graphs of ggml, the library below llama.cpp, as torch modules."""

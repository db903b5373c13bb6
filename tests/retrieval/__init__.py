"""Retrieval checkpoints of every module and setting, and their comparison with sentence-transformers."""

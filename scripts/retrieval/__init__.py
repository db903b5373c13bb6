"""Retrieval checkpoints as sentence-transformers saves them, and what onnxtool makes of each."""

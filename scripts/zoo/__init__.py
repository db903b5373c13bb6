"""Tiny random checkpoints of every model type that transformers knows for a task, complete with their processors."""

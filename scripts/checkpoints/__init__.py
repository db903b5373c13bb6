"""Checkpoints that are damaged in every way that was thought of, for `scripts/check_checkpoints.py`."""

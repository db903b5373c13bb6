"""The rows of check_checkpoints.py."""

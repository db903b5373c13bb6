"""Tests of training checkpoints."""

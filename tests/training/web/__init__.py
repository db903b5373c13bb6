"""Tests of training with artifacts."""

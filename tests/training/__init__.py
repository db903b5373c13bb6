"""Tests of onnxtool/training."""

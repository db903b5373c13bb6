"""Tests of onnxtool/training/graphs."""

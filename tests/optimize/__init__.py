"""Tests of onnxtool/optimize."""

"""Tests of onnxtool/optimize/precision."""

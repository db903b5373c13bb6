"""Tests of onnxtool/summary."""

"""Tests of onnxtool/infer."""

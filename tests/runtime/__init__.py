"""Tests of onnxtool/runtime."""

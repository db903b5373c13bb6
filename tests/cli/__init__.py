"""Tests of onnxtool/cli."""

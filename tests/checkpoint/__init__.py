"""Tests of onnxtool/texts."""

"""Tests of onnxtool/export."""

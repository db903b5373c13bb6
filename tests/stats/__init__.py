"""Tests of onnxtool/stats."""

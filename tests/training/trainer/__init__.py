"""Tests of onnxtool/training/trainer."""

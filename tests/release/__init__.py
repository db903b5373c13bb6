"""Tests of onnxtool.release."""

"""Tests of onnxtool/autodiff."""

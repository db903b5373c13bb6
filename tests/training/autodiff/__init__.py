"""Tests of onnxtool/training/autodiff."""

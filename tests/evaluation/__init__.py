"""Tests of onnxtool.evaluation."""

"""Tests of onnxblock."""

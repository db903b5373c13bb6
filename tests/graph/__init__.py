"""Tests of the knowledge about ONNX graphs."""

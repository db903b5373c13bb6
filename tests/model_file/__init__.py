"""Tests of ONNX files on disk."""

"""Tests of the passes that rewrite onnx_ir graphs, a file for each."""

"""Optimize ONNX files: fuse and convert with a list of passes, verify against the input, stamp."""

"""Shared knowledge about ONNX graphs: matching and editing, operators, shapes."""

"""ONNX files that packages of others ship: which, and what goes into them."""

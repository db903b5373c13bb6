"""ONNX files that packages of others ship: which, what goes into them, and how a result is judged."""

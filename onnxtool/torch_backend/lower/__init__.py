"""Lower ATen operators: decisions, decompositions, rewrites, translation to ONNX and corrections."""

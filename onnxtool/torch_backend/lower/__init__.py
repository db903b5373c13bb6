"""What becomes of an ATen operator: decisions, decompositions, rewrites, translation to ONNX and corrections of it."""

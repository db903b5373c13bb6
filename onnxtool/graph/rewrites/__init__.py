"""Rewrites of ONNX graphs that the optimizer, the exporter and the torch.compile backend share."""

"""What is known about ONNX graphs, once: matching and editing, operators, shapes."""

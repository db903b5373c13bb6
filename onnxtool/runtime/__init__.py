"""onnxruntime: providers, sessions, inputs generated from a model's signature, comparison of outputs, timing."""

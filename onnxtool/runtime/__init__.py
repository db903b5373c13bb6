"""onnxruntime: providers, sessions, inputs made up from a model's signature, comparison of outputs, timing."""

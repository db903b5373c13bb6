"""Training checkpoints on disk: onnxtool's own file, and the one of onnxruntime-training."""

"""What runs a partition: sessions, tensors as values of onnxruntime, the cache on disk, dumps."""

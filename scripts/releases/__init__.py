"""Releases of onnxruntime side by side: find and install them, and run files in them."""

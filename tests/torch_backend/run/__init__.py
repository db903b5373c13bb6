"""Tests of onnxtool/torch_backend/run/."""

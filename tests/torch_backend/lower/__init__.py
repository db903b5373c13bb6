"""Tests of onnxtool/torch_backend/lower/."""

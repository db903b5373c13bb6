"""Tests of onnxtool/torch_backend/partition/."""

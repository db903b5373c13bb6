"""Tests of onnxtool/torch_backend/capture/."""

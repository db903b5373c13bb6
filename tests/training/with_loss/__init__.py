"""Tests of onnxtool/training/with_loss."""

"""A PyTorch model compiled together with its loss: a module for custom training loops, and transformers' Trainer."""

"""A model of PyTorch with its loss, compiled as one: a module for a loop of one's own, and transformers' Trainer."""

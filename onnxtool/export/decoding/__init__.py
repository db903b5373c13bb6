"""Decoders with their cache as inputs and outputs: trace them, and verify them by generating."""

"""Decoders with their cache as inputs and outputs: how they are traced, and verified by generating."""

"""Decoders with their cache as inputs and outputs: how they are traced, and proven by generating."""

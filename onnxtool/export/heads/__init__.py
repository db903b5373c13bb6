"""Heads, which an exported graph computes on top of the model: steps, their checkpoint settings, and the choice."""

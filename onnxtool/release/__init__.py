"""Release a model: evaluated, described, signed and published."""

"""Measure a model's retrieval quality on a test collection, and compare it with another model."""

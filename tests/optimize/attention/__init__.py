"""Tests of what an attention is made of."""

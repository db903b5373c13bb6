"""Tests of encoding a corpus."""

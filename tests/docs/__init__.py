"""Tests of README and docs/."""

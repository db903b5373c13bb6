"""Tests of training artifacts."""

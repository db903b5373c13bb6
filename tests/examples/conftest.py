"""Fixtures of these tests."""

from tests.docs.reader import reader as reader

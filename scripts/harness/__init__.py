"""Shared by all benchmarks: measured processes, workers that take turns, tables, and the description of the machine.

The standard library alone: peers run these modules in environments of their own.
"""

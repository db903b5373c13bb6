"""What all benchmarks share: processes that are measured, workers that take turns, and the machine beside the figures.

The standard library alone: peers run these modules in environments of their own.
"""

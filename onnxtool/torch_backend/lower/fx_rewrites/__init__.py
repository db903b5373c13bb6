"""Rewrites of FX graphs of ATen operators, applied before a graph is partitioned."""

"""Rewrites of FX graphs of ATen operators, made before a graph is cut into partitions."""

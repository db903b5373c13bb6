"""Export a checkpoint to a file: load, trace, add a head, save, verify, stamp; use the first strategy that works."""

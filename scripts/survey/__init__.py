"""Try, judge and tabulate the export of model types."""

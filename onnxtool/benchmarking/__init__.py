"""Time a model on generated inputs or texts, by itself or in turns with another."""

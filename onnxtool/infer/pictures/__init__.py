"""Run picture files through a model: vectors of pictures, and pictures ranked for a text."""

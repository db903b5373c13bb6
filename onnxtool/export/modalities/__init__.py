"""Model inputs: a module per modality, and `finding`, which tells the modality of a model."""

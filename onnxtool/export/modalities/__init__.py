"""Model inputs: one module per modality, and `finding`, which determines a model's modality."""

"""What goes into a model: a module for each modality, and how the one of a model is found."""

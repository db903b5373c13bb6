"""Which nodes run together in one session, and which views PyTorch makes between sessions."""

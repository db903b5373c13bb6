"""What an exported graph computes on top of the model: steps, their settings in a checkpoint, and how to choose."""

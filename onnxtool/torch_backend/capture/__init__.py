"""What TorchDynamo hands over: which PyTorch functions AOTAutograd traces in a form of ours."""

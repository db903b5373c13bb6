"""Our own decompositions: express what torch.onnx cannot translate in operators that it can.

`lower/decisions.py` says which operator each one is for. A decomposition takes its operator's arguments. If it returns
NotImplemented, the operator is left to its translation or stays in PyTorch. It matches the operator for NaN, infinities
and empty tensors, and needs no more memory than a few times its arguments and results.
"""

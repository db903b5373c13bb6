"""Decompositions of our own: what the translation of torch.onnx lacks, in operators that it has.

`lower/decisions.py` says which operator each of them is for. A decomposition takes the arguments of its operator. Where
it returns NotImplemented, the operator is left to its translation or stays in PyTorch. It gives what the operator gives
for NaN, infinities and empty tensors, and needs no more memory than a few times its arguments and results.
"""

"""Graphs that others wrote, what each must give, and the judgement of what onnxtool makes of them."""

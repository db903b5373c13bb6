"""Turn a forward graph with a loss into a training and an eval graph."""

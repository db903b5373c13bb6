"""From a forward graph with its loss to a training and an eval graph."""

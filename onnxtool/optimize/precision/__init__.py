"""Lower precision with a measured error: which products can have int8, what it does to them, and which cannot afford it."""

"""Lower precision with a measured error: what can have it, what that does to the outputs, and what stays out of it."""

"""Training: gradient graphs of standard operators, and what is built on them."""

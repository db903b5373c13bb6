"""Make hostile models, tokenizers and configurations, and see how the commands end on them."""

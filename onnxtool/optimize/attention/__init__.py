"""What an attention is made of, found by meaning: scores and their scale, masks, and the heads of q, k and v."""

"""Match the parts of an attention: scores and their scale, masks, and the heads of q, k and v."""

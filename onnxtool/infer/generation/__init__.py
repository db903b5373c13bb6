"""Models that write: decoders and encoder-decoders with their cache, as `generate` of transformers runs them."""

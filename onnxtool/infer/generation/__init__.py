"""Text generation: decoders and encoder-decoders with a cache, run by transformers' `generate`."""

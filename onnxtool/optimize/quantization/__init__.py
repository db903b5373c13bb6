"""Lower precision with a measured error: quantizable layers, the effect on outputs, and fallback layers."""

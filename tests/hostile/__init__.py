"""Models that ask libraries for too much, and sound ones to damage."""

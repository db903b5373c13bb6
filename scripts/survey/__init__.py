"""Which model types can be exported, and are right: how that is tried, judged and told."""

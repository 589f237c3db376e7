"""Model weights in the formats of others."""

"""Self-contained HTML pages: their frame, charts on a time axis, and pictures of plans, clusters, curves. No torch."""

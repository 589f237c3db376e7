"""Small tools: guarded file reading, text for messages, progress, caching, YAML with line numbers."""

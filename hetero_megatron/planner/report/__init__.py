"""What the user sees of a search or a prediction: text, JSON data, timelines and pages."""

"""What a user reads about a predicted step: text and JSON, timelines, a page."""

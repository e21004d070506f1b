"""What a run found, as one HTML page and as Markdown with pictures."""

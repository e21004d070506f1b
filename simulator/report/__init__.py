"""Reports of the outcome of a benchmark, as one HTML page and as Markdown with pictures."""

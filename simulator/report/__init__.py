"""Reports of the outcome of a benchmark, as one HTML page with pictures."""

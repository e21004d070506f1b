"""Parts of the benchmark of performance models on Morphling's measurements."""

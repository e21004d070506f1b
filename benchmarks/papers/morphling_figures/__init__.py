"""Parts of the benchmark that repeats the figures of Morphling's paper."""

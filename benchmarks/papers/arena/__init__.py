"""A simulator with the semantics of Arena's artifact, for results comparable with its own."""

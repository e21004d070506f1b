"""A forward pass as a flat list of operators, from any tracer, and the layers made from it."""

"""A forward pass as a flat list of operators, whatever it was traced by, and the layers made of it."""

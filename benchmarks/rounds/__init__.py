"""Rounds on their own: instances by seed, contests of solvers, and judges that share no code with them."""

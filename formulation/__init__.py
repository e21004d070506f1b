"""Domain types, the statement of a round, its independent checker and its explanations."""

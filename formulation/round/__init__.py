"""The statement of a round: from a policy and a snapshot to columns, rows and goals."""

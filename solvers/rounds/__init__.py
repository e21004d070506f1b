"""The core of a round: from a snapshot and a policy to checked, explained decisions; it is pure."""

"""Jobs that ran on a real cluster: their records, replayed and decided again."""

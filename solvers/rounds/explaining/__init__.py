"""The explanation of a round's decision on a job, with steps that further rounds have tried."""

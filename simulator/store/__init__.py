"""The service's store without a database: one cluster in memory, with the same snapshots."""

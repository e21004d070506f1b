"""The state of a cluster before a round: its snapshot, with Cells, nodes and tenants."""

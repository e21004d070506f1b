"""The estimates of Cells that the server makes for workloads that have none."""

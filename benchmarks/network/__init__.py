"""Networks with jobs on them, to measure on."""

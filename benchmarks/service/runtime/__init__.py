"""The parts of the benchmark of jobs that really train."""

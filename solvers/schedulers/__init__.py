"""Published schedulers, each after its paper, on the same snapshots and under the same checker."""

"""Published schedulers and our policies compared in simulation."""

"""The command ``tessera simulate``, which runs a trace of jobs under policies on a simulated cluster."""

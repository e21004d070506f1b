"""Models of reconfigurable training: iteration times of plans on GPUs, CPUs and bandwidths."""

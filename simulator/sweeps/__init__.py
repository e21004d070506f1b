"""Many independent runs in parallel, on this machine or a Ray cluster, resumable."""

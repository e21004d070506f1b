"""Many independent runs side by side: in local processes or on a Ray cluster, resumable, same results."""

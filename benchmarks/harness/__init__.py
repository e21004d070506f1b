"""What every benchmark is made of: the registry, its command, common options, progress."""

"""The parts that every benchmark uses: the registry, its command, common options and progress."""

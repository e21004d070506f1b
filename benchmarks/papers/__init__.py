"""Published experiments repeated: Arena's artifact and testbed, Morphling's traces, motivations."""

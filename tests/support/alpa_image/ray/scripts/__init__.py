"""The commands of Ray."""

"""The settings of a server by subject, and their sources."""

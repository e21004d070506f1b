"""The settings of a server by subject, and where they come from."""

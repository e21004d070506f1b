"""The values that cross the border between the service and its store: what users name and read."""

"""The values that pass between the service and its store, with the names that users see."""

"""What arrives in a simulation: published traces with their clusters and profiles, and synthetic ones."""

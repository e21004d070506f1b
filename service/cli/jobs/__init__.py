"""Commands on jobs."""

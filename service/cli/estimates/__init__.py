"""Commands on models, their estimates and their measurement."""

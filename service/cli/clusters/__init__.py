"""Commands on clusters, their nodes, networks, tenants and reservations."""

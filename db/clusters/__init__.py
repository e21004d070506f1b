"""Clusters: their nodes, networks, tenants, reservations and policies."""

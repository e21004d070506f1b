"""Values, tables, errors and texts that every other part uses."""

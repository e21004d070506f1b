"""The schema, its migrations, and the connection to the database."""

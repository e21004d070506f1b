"""PostgreSQL: the schema, its migrations, and the store that rounds and users' calls work on."""

"""Rules on who may call the server, and on what each caller may do."""

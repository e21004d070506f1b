"""Who may call the server, and what each caller may do."""

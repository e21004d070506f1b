"""Shell scripts, read as bash would run them, without running them."""

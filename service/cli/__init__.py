"""The command line ``tessera``: a client of the API, and the way to start its servers."""

"""Programs that run in the job's own process. The agent starts them by path, and imports none.

They may run in interpreters without Tessera, and so import nothing of it.
"""

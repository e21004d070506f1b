"""Job schedulers under which networks are compared: where gangs go, and who shares GPUs.

``placers`` (plain rules) and ``hived`` answer where a gang goes; ``muri`` which jobs share their GPUs. They
know nothing of links' loads.
"""

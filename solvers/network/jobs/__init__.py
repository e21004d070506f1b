"""Job schedulers under which networks are compared: they place gangs and let jobs share GPUs.

``placers`` (plain rules) and ``hived`` decide where a gang goes. ``muri`` decides which jobs share
their GPUs. None of them knows the load of links.
"""

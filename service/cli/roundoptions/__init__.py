"""The options of a round, which ``round``, ``replay``, ``solve`` and ``policy set`` share."""

"""The options of a round, which ``round``, ``replay``, ``solve``, ``policy set`` and ``shadow set`` share."""

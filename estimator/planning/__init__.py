"""Choice of a Cell's execution plan, by exact search or by the methods of Arena and Crius."""

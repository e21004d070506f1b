"""Which plan a Cell gets: stages, Pareto frontier, proxy plan, assembly, exact search, tuning."""

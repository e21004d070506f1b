"""Choice of a Cell's plan: stages, Pareto frontier, proxy plan, assembly, exact search, tuning."""

"""The calls of agents: their enrolment, and their streams."""

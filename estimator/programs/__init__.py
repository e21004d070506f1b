"""Forward passes as flat lists of operators, from any tracer, and their division into layers."""

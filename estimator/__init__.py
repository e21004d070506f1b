"""How fast a Cell runs; so far an analytic roofline for sample profiles."""

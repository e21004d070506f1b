"""Commands on rounds, policies and what-if questions."""

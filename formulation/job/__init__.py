"""Jobs alone: their life, their launch, their execution plans and their runtimes."""

"""A stand-in for DeepSpeed, which has nothing but its launcher."""

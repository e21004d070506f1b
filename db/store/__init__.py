"""The store that the service works on, made of the other parts."""

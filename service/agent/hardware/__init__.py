"""The devices of a node and their health: discovery, faults, and checks of the site."""

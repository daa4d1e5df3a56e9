"""``zenps plan``: recommends a scheme for a training and a network."""

"""``zenps plan``: which scheme suits a training and a network."""

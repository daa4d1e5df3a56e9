"""Reducers: what is made of the pushes of a round."""

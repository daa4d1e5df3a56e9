"""Encoding: how a tensor becomes pushes, and how answers become a tensor."""

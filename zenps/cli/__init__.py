"""Command line of ZenPS: the command ``zenps``."""

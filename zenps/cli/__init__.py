"""The command zenps."""

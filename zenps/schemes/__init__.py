"""Synchronisation schemes: what each sends, to whom, and what that costs."""

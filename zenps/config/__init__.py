"""Settings: which there are, what each may be, where its value comes from."""

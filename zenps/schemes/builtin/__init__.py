"""The schemes, one in each module: ``SCHEME``, its declaration, with its cost formula."""

"""Transport: sockets to scheduler and servers, and the threads that drive them."""

"""Transport: sockets to the scheduler and the servers, and the threads that poll them."""

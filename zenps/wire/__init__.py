"""Wire protocol of the roles: messages, frames, sockets, and shared memory within a host."""

"""What the roles say to each other: messages, frames, sockets."""

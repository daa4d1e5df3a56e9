"""Scheduler role: cluster membership, epochs, leases, barriers and the ring of servers."""

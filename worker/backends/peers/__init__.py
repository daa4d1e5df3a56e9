"""Peer-to-peer allreduce among workers over gloo: docs/decisions/0022-workers-meet-at-servers.md."""

"""Rounds that go from worker to worker, over gloo: docs/decisions/0022-workers-meet-at-servers.md."""

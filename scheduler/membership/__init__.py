"""Membership of a job, as pure state machines: registration, views, recovery, barriers and drains."""

"""Logs of the controller, in the shape of the workloads' logs: one query by `run` finds a job's lines in all."""

import logging

import tba.log

# Event names are noun_past_verb and an API (interface.md §4): add, do not rename.
OPERATOR_STARTED = "operator_started"
OPERATOR_STOPPED = "operator_stopped"
OPERATOR_FAILED = "operator_failed"
LEASE_ACQUIRED = "lease_acquired"
LEASE_LOST = "lease_lost"
JOB_RECONCILED = "job_reconciled"
JOB_REFUSED = "job_refused"
RECONCILE_FAILED = "reconcile_failed"
OBJECTS_VANISHED = "objects_vanished"
KUEUE_CHANGED = "kueue_changed"

log = tba.log.log


def configure(identity: str) -> None:
    """Set up logging of this process, kopf's and aiohttp's included. Lines about a job carry its name as `run`."""
    tba.log.configure(role="operator", run="")
    tba.log.bind(replica=identity)
    # kopf's retries of requests are errors to it and routine to us: an outage shows as watch age and failed probes.
    logging.getLogger("kopf").setLevel(logging.WARNING)

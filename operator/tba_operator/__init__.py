"""The Kubernetes side: a controller that turns TBAJobs into pods. `tba` never imports it."""

COMMANDS = {"render": "Print the objects that the operator makes of a job, without a cluster."}
"""What it adds to `tba`: name -> one line of help (see tba.cli.PLUGINS)."""

"""The Kubernetes side: a controller that turns TBAJobs into pods. `tba` never imports it."""

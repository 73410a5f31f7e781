"""Run history to summary, figures and one HTML page: everything a person reads about a run, from its bucket alone."""

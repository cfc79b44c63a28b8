"""The step loop and its two ends: an edit becomes a job, jobs take steps together, a done job becomes a picture."""

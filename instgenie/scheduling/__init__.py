"""Which worker runs an edit, and when a job joins a batch. Imports no torch and opens no socket."""

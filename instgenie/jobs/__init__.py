"""Jobs: what an edit carries through its steps. Knows no model family."""

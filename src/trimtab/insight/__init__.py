"""Looking at runs: replay on recorded tokens, alarms, comparison, the report."""

"""The members of a job, and the knowledge of failed ones."""

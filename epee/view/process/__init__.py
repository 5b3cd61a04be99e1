"""The other processes of the job as the operating system and shared memory show them."""

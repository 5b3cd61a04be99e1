"""Groups over several hosts: mirrors of remote outboxes, what is told to which host, waits that move bytes."""

"""Groups over several hosts: mirrors of remote outboxes, the data sent to each host, waits that move bytes."""

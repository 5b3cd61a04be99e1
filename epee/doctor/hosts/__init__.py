"""What `epee doctor` says of other hosts: what groups over several would use, and whether another one is reached."""

"""The part of `epee doctor` about other hosts: settings of groups over several hosts, and reachability."""

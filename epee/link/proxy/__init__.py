"""The CPU proxy of a rank: processes that move chunks of records between hosts on behalf of kernels."""

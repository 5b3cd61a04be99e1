"""GPU support shared by all buffers and groups: platform, kernel arguments, reports, share of the GPU."""

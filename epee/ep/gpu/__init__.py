"""What both modes of a buffer share on GPUs: platform, arguments, reports, share of the GPU."""

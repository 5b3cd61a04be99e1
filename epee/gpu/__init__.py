"""What both kinds of buffers share on GPUs: platform, arguments, reports, share of the GPU."""

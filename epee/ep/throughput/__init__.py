"""The two paths of `Buffer`: rows at their final offset on CPUs, slots that peers fill on GPUs."""

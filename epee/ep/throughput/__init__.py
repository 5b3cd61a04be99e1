"""The two paths of `Buffer`: rows in their final place on CPUs, slots that peers fill on GPUs."""

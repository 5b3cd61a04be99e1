"""What both DeepEP buffers need."""

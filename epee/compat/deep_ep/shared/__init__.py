"""Parts shared by both DeepEP buffers."""

"""Expert parallelism: dispatch and combine."""

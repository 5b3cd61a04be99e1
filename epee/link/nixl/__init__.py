"""The `nixl` engine: links whose frames a NIC may write into registered memory (`docs/hosts.md`; extra `nixl`)."""

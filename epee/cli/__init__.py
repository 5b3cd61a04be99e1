"""The `epee` command. Each command is thin: it reads options and calls the package."""

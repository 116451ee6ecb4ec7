"""The `cacheflow` command."""

"""What a policy would gain on some hardware: `core.simulator` over profiles and workloads."""

"""A server on a virtual clock, around the claims, plans and policies that the engine uses."""

"""What tests of a running server share."""

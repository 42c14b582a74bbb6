"""torch's own suites for distributed RPC, run against gradwire in the place of torch's modules."""

"""The parts of stacks: one component a file, usable from any Pulumi program; none reads config."""

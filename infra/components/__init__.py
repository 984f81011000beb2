"""What stacks are made of: one component a file, usable from any Pulumi program; none reads config."""

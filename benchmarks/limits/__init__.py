"""What the machine can do without any framework: the limits that goals are fractions of."""

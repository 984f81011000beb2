"""The real code in a simulated world: every interleaving, fault and clock comes from one seed. docs/simulation.md."""

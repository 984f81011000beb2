"""Pure text: what a Ray head and its nodes are given to read and to run."""

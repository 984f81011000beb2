"""Pure text: the files and scripts of a Ray head and its nodes."""

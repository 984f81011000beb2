"""Jobs on Slurm: on a login node, over ssh to one, or as a bundle of files that is submitted by hand."""

"""Jobs on named machines, through the system's `ssh`."""

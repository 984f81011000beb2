"""The peers and ourselves, one file each, all behind `Peer`."""

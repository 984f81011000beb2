"""The peers, one file each, all behind `Peer`; and ourselves behind the same."""

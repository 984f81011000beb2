"""Jobs on Ray clusters."""

"""Ray clusters on TPUs: what the runtime does for them beside Ray itself."""

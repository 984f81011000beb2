"""Ray clusters on TPUs: the runtime's part beside Ray itself."""

"""Who may speak to the processes of a cluster."""
